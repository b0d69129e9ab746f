"""Commands for trained encoders: embeddings, pictures and predictions. Importing the package imports no torch.

A command is one module, listed below, and one file of defaults in configs/ (:class:`~dmjd.explore.registry.Tool`).
"""

from dmjd.explore import embed, neighbours, predict, show, tsne
from dmjd.explore.registry import TOOLS, Tool, register

for module in (embed, tsne, neighbours, predict, show):
    register(module.TOOL)

__all__ = ["TOOLS", "Tool", "register"]
