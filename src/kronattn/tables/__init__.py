"""The paper's tables, recomputed: measure, compare with the printed values, render."""
