"""The page to try it on: a trained network, an image, and where its attention looks."""
