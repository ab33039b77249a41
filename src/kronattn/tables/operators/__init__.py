"""Table 2 of the paper: what attention operators cost on one feature map, recomputed, and carried further."""
