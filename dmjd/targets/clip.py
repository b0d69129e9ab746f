"""Features of CLIP's image tower as the target: DMJD, MVP and MILAN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError
from dmjd.files import at_home, obstacle, read_file
from dmjd.ops.images import normalise
from dmjd.safe_load import check_torch, one_line, parse_json, weights_only_forced
from dmjd.targets.features import NORMS, frozen_on, normalise_features, render_features
from dmjd.targets.tokenizer import TargetSpec, check_grid, input_size, register
from dmjd.targets.weights import check_values, weights_file

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's own training images, whatever the student is given."""

LOCAL, CONFIG = "local-dir:", "open_clip_config.json"
"""open_clip's prefix of a model that is a folder, and the configuration in it, beside the weights."""

EXPECTED = (
    "the weights of target.model as open_clip reads them: a .safetensors file or a dictionary of tensors, such as "
    "open_clip_model.safetensors of a model's page, or torch.save(torch.jit.load('ViT-B-16.pt').state_dict(), FILE) "
    "of OpenAI's archive"
)


def load_clip(model: str, weights: str | None, size: tuple[int, int]) -> nn.Module:
    """The image tower that open_clip calls ``model``, for images of ``size`` (height, width) pixels, frozen.

    ``model`` may be ``local-dir:FOLDER``, whose weights lie beside its configuration; ``weights`` is then None.

    Raises:
        ConfigError: if open_clip or the file is missing, the name is unknown, the file does not fit it, or the tower is
            no ViT.
    """
    try:
        import open_clip
    except ImportError as error:
        raise ConfigError("target.name=clip needs open_clip: pip install 'dmjd[clip]'") from error
    config: dict[str, Any] | None
    if model.startswith(LOCAL):
        model = LOCAL + at_home(model.removeprefix(LOCAL))
        config, file = _config_in(Path(model.removeprefix(LOCAL)), weights), None
    else:
        # Any other scheme is one of downloads.
        config = None if ":" in model else open_clip.get_model_config(model)
        if config is None:
            raise ConfigError(
                f"target.model={model} is not an open_clip model; open_clip.list_models() lists them, such as "
                f"ViT-B-16-quickgelu (OpenAI's weights) and ViT-L-14, and {LOCAL}FOLDER is one of this machine's"
            )
        file = weights_file(weights, EXPECTED)
    if "hf_model_name" in config.get("text_cfg", {}):
        raise ConfigError(
            f"target.model={model} has a text tower that open_clip downloads; choose a model with open_clip's "
            "own text tower"
        )
    if "timm_model_name" in config.get("vision_cfg", {}):  # which timm would download
        raise ConfigError(f"target.model={model} has a timm image tower; choose a model with open_clip's own ViT")
    # Absolute: some names, such as openai, open_clip would download.
    source = {} if file is None else {"pretrained": str(file.absolute())}
    try:
        if file is not None and file.suffix != ".safetensors":
            with file.open("rb") as content:
                check_torch(content, None)
        with weights_only_forced():
            whole = open_clip.create_model(
                model, force_image_size=size, weights_only=True, require_pretrained=True, **source
            )
    except Exception as error:  # a checkpoint of another model fails in as many ways as there are formats
        raise ConfigError(
            f"target.weights={file or 'null'} is not target.model={model} ({one_line(error)}); expected is {EXPECTED}"
        ) from error
    tower: nn.Module = whole.visual
    if not hasattr(tower, "forward_intermediates") or not hasattr(tower, "ln_post"):
        raise ConfigError(f"target.model={model} has no ViT image tower, so no token features; choose one with a ViT")
    check_values(tower.state_dict(), f"target.weights={file or 'null'}")
    return tower.requires_grad_(False).eval()


def _config_in(folder: Path, weights: str | None) -> dict[str, Any]:
    """The configuration of the model that open_clip has saved in ``folder``, with its weights."""
    if weights is not None:
        raise ConfigError(f"target.weights must be null for target.model={LOCAL}FOLDER, which holds them")
    try:
        config: dict[str, Any] = parse_json(read_file(folder / CONFIG))["model_cfg"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"target.model={LOCAL}{folder}: {CONFIG} of open_clip, with model_cfg, cannot be read there ({error})"
        ) from error
    for file in sorted(folder.iterdir()):  # open_clip chooses among them, and would wait for a pipe
        if file.exists() and not file.is_dir() and (what := obstacle(file)):
            raise ConfigError(f"target.model={LOCAL}{folder}: {file.name} is {what}; remove it")
    return config


def clip_patch(tower: nn.Module) -> int:
    """Side of a patch of an image tower in pixels."""
    sizes: Any = tower.patch_size
    return int(sizes[0])


@dataclass
class ClipTarget:
    """Patch tokens of one block of CLIP's image tower.

    tower: from :func:`load_clip`; moves to the images' device when it is first called.
    patch: side of a patch of the *student* in pixels, for pictures.
    grid: (h, w) tokens, the tower's and the student's.
    dim: width of the features, which the tower must have.
    layer: which block, from 0, or from the last with -1.
    ln_post: apply the tower's last norm.
    projected: then map to the space that images and texts share.
    norm: "layernorm" (the paper) or "none".
    """

    tower: nn.Module
    patch: int
    grid: tuple[int, int]
    dim: int
    layer: int = -1
    ln_post: bool = True
    projected: bool = True
    norm: str = "layernorm"

    codes = False

    def __post_init__(self) -> None:
        tower: Any = self.tower
        blocks = len(tower.transformer.resblocks)
        if not -blocks <= self.layer < blocks:
            raise ValueError(f"layer must be between {-blocks} and {blocks - 1}, got {self.layer}")
        if self.projected and not self.ln_post:
            raise ValueError("projected=true needs ln_post=true, as the projection was trained behind that norm")
        if self.projected and tower.proj is None:
            raise ValueError("projected=true, and this image tower has no projection")
        width = tower.proj.shape[1] if self.projected else tower.transformer.width
        if width != self.dim:
            raise ValueError(f"dim must be {width}, the width of these features, got {self.dim}")

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 ``[B, H, W, 3]`` of the tower's size -> float32 ``[B, N, dim]``."""
        tower: Any = self.tower
        blocks = len(tower.transformer.resblocks)
        with frozen_on(tower, images.device):
            found = tower.forward_intermediates(
                normalise(images, MEAN, STD),
                indices=[self.layer % blocks],
                stop_early=True,
                normalize_intermediates=self.ln_post,
                intermediates_only=True,
                output_fmt="NLC",
            )
            values = found["image_intermediates"][0]
            if self.projected:
                values = values @ tower.proj
            return normalise_features(values, self.norm)

    def render(self, values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        """See :func:`dmjd.targets.features.render_features`."""
        return render_features(values, grid, self.patch)


def _build(config: PretrainConfig) -> ClipTarget:
    target, patch = config.target, config.backbone.patch_size
    tower = load_clip(target.model, target.weights, input_size(config))
    check_grid(config, clip_patch(tower))
    height, width = config.data.image_size
    grid = height // patch, width // patch
    return ClipTarget(tower, patch, grid, target.dim, target.layer, target.ln_post, target.projected, target.norm)


def _parameters(config: PretrainConfig) -> int:
    """Those of the image tower that open_clip calls ``target.model``; of other towers those of a ViT-B/16."""
    try:
        import open_clip

        vision = (open_clip.get_model_config(config.target.model) or {}).get("vision_cfg", {})
    except ImportError:
        vision = {}
    width, layers, patch = (
        vision.get(key, usual) for key, usual in (("width", 768), ("layers", 12), ("patch_size", 16))
    )
    tokens = math.prod(side // patch for side in input_size(config))
    # Blocks with four times the width in their MLPs, embeddings of patches and positions, norms, the projection.
    return layers * (12 * width**2 + 13 * width) + width * (3 * patch**2 + tokens + 6 + config.target.dim)


register(
    "clip",
    TargetSpec(
        _build,
        norms=NORMS,
        colour=True,
        second_size=True,
        dim=lambda config: config.target.dim,
        blocks=lambda target: target.tower.transformer.resblocks,
        parameters=_parameters,
    ),
)
