"""Training, on Lightning: recipes, what they are built from, and what a run leaves behind."""
