"""What a trained network says about image files."""
