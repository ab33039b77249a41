"""What a trained network says about image files."""

from kronattn.predict.inputs import list_images
from kronattn.predict.run import Result, predict_files
from kronattn.predict.write import results_csv, results_json, results_table

__all__ = ["Result", "list_images", "predict_files", "results_csv", "results_json", "results_table"]
