"""Evaluations of frozen encoders, export to timm and conversion of checkpoints. Importing the package imports no torch.

An evaluation is one module, listed below, and one file of defaults in configs/ (:class:`~dmjd.evaluate.Evaluation`).
"""

from dmjd.evaluate import ap, knn, linprobe, miou, validate
from dmjd.evaluate.registry import EVALUATIONS, Column, Context, Evaluation, Scores, describe, evaluate, register

for module in (knn, linprobe, validate, miou, ap):
    register(module.EVALUATION)

__all__ = ["EVALUATIONS", "Column", "Context", "Evaluation", "Scores", "describe", "evaluate", "register"]
