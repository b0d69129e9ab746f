"""Writes docs/methods.md from the presets in configs/.

python docs/make_methods.py            write it
python docs/make_methods.py --check    0 if it is what the presets say, 1 if not
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dmjd.builders import build_mask_spec, build_objective, peak_lr, target_dim, token_grid
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.resources import configs_dir

PAGE = Path(__file__).with_name("methods.md")

HEAD = """# Methods and experiments

Written by `python docs/make_methods.py` from `configs/`; a test fails where the two differ. A method is five choices
(see [architecture.md](architecture.md)); an experiment is a method with the sizes of one row of a table of the paper.
Systems that the paper compares with are in [comparison.md](comparison.md).

Targets with weights read them from `target.weights`, a file, never from the network: `dvae` the encoder of DALL-E as a
dictionary of tensors, `vqkd` BEiT v2's tokenizer, `clip` what open_clip reads (`pip install 'dmjd[clip]'`), or, with
`target.model=local-dir:FOLDER`, a folder that it wrote. A missing file is answered by a sentence that tells how to make
one. Their features are computed in every step and not kept: a crop is drawn anew in each epoch, so that a feature kept
under a sample's id would be that of other pixels.

BEiT's rectangles keep a quota, so that every view hides exactly as many tokens as asked; the official code now and then
hides fewer. With disjoint masking two views of 75 of 196 tokens predict 150 of them, and `beit_dm_vit_base` does.
"""


def comment(path: Path) -> str:
    """What a preset says about itself."""
    lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ") and "@package" not in line]
    return " ".join(lines)


def _branch(config: PretrainConfig) -> str:
    decoder = config.method.decoder
    return "linear" if decoder.name == "linear" else f"{decoder.depth} x {decoder.dim}"


def _target(config: PretrainConfig) -> str:
    chosen = config.target
    name = f"{chosen.name} ({chosen.flavour})" if chosen.name == "hog" else chosen.name
    return name if chosen.norm == "none" else f"{name}, {chosen.norm}"


def _visible(config: PretrainConfig) -> str:
    return config.method.visible_branch.projector if config.method.visible_branch.enabled else "-"


def _row(experiment: str) -> str:
    config: PretrainConfig = compose("pretrain", [f"experiment={experiment}"])
    grid = token_grid(config)
    spec = build_mask_spec(config.mask, grid)
    rates = spec.true_rates(grid)
    with torch.device("meta"):
        model = build_objective(config, target_dim(config)).model
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    cells = (
        f"`{experiment}`",
        f"{millions:.1f}",
        f"{config.mask.views} {config.mask.pattern}",
        f"{rates.m_corr:.3f}",
        f"{rates.m_pred:.3f}",
        _target(config),
        config.method.mim_loss,
        _branch(config),
        _visible(config),
        f"{config.epochs} ({spec.effective_epochs(config.epochs):g})",
        str(config.batch_size),
        f"{peak_lr(config, spec, grid):.3g}",
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The whole page."""
    methods = sorted((configs_dir() / "method").glob("*.yaml"))
    experiments = sorted((configs_dir() / "experiment").glob("*.yaml"))
    titles = (
        "experiment",
        "M parameters",
        "views",
        "m_corr",
        "m_pred",
        "target",
        "L_mim",
        "decoder",
        "VDB",
        "epochs (ETE)",
        "images a step",
        "learning rate",
    )
    lines = [HEAD, "## Methods", "", "| `method=` | |", "|---|---|"]
    lines += [f"| `{path.stem}` | {comment(path)} |" for path in methods]
    lines += ["", "## Experiments", "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [_row(path.stem) for path in experiments]
    lines += ["", "Parameters are trainable ones; the learning rate is that after warm-up.", ""]
    lines += [f"- `{path.stem}`: {comment(path)}" for path in experiments]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The exit code."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.is_file() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
