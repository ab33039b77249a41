"""Table 6 of the paper: segmentation with ASPP, regular and Kronecker attention; and what the heads cost."""
