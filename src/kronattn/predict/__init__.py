"""What a trained network says about image files."""

from kronattn.predict.inputs import list_images
from kronattn.predict.run import Result, predict_files
from kronattn.predict.write import results_csv, results_json, results_table
from kronattn.present.legend import colours_of, draw_legend

__all__ = [
    "Result",
    "colours_of",
    "draw_legend",
    "list_images",
    "predict_files",
    "results_csv",
    "results_json",
    "results_table",
]
