"""Images and masks: from files to tensors."""
