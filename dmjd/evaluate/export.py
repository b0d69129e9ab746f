"""``dmjd export``: encoder, classifier or whole model of a checkpoint for timm, ONNX, torch.export or Hugging Face,
verified against ours."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import timm
import torch
from safetensors.torch import save
from torch import Tensor, nn

import dmjd
import dmjd.models.timm_models  # registers the ConvViT with timm
from dmjd.builders import build_objective, target_dim
from dmjd.builders.weights import load_weights
from dmjd.config import EvaluationConfig, ExportConfig, FinetuneConfig, HeadConfig, PretrainConfig
from dmjd.errors import ConfigError, UserError
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.evaluate.features import pool_features
from dmjd.evaluate.onnx_model import Features, Logits, Outputs, check_onnx, write_onnx, write_program
from dmjd.evaluate.output import check_output
from dmjd.evaluate.registry import BASELINES
from dmjd.files import obstacle, printable, read_file, standing_place
from dmjd.interop import huggingface
from dmjd.interop.shards import shard_bytes, write_shards
from dmjd.interop.timm import TimmCall, timm_call, timm_state
from dmjd.models.decoder import MAEDecoder
from dmjd.safe_load import parse_json

logger = logging.getLogger("dmjd")

FOLDER = "export"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SUFFIXES = {"timm": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2", "huggingface": "", "huggingface_mae": ""}
"""``format`` -> suffix of the file; empty for a folder."""

_GRAPHS = ("onnx", "torch_export")
"""Formats that hold computations, not weights by name."""

TOLERANCE = 1e-5
"""Largest difference of two features, relative to the largest feature."""

WEIGHTS, CARD = "model.safetensors", "README.md"


class Exported(NamedTuple):
    """path: the file or folder. line: one line of Python that loads it."""

    path: Path
    line: str


@dataclass(frozen=True)
class _Encoder:
    """Input of the writers. form: ``format``. shard_size: bytes. state: of timm's model ``call``. card: the sidecar,
    without the line."""

    frozen: FrozenEncoder
    form: str
    shard_size: int | None
    call: TimmCall
    state: dict[str, Tensor]
    card: dict[str, Any]


def export(config: ExportConfig) -> Exported:
    """Write the encoder of ``config.checkpoint`` in ``config.format``, with all that is needed to load it; of a
    fine-tuned run with its classifier, whose classes the sidecar names. onnx and torch_export have the whole model of a
    segmentation or detection (:mod:`dmjd.evaluate.export_dense`).

    timm: a .safetensors file; :func:`sidecar` and the file's header under ``dmjd`` hold ``architecture`` and
    ``arguments`` of ``timm.create_model(architecture, checkpoint_path=file, **arguments)``, and the whole line as
    ``load``. onnx, torch_export: a file, and the sidecar. huggingface, huggingface_mae: a folder for transformers. An
    existing file is replaced atomically, an existing folder of an earlier export as a whole.

    Returns:
        The file, ``config.output`` or ``RUN/export/encoder-WEIGHTS-step########-DTYPE.safetensors`` (``classifier-`` of
        a fine-tuned run), and the line.

    Raises:
        CheckpointError, ConfigError: as :func:`~dmjd.evaluate.encoder.load_encoder`.
        ConfigError: if ``config.output`` cannot be written, or the format cannot hold this encoder.
        UserError: if features from the file differ from the encoder's, or are not finite; nothing is written.
    """
    suffix = SUFFIXES[config.format]
    if config.shard_size is not None and suffix:
        raise ConfigError(f"shard_size={config.shard_size}: format={config.format} is one file; remove shard_size")
    if config.output is not None:
        check_output(Path(config.output), [suffix] if suffix else [], Path(config.checkpoint))
    if config.format == "onnx":
        check_onnx()
    if config.format in _GRAPHS and config.dtype != "fp32":
        raise ConfigError(f"dtype={config.dtype}: format={config.format} writes float32; remove dtype")
    if config.format == "huggingface_mae" and config.weights not in ("auto", "trained"):
        raise ConfigError(f"weights={config.weights}: format=huggingface_mae needs weights=trained, with the decoder")
    made = _encoder(config)
    frozen = made.frozen
    kind = "mae" if config.format == "huggingface_mae" else "encoder" if frozen.classifier is None else "classifier"
    if frozen.objective is not None and config.format in _GRAPHS:
        kind = {"segment": "segmentation", "detect": "detection"}[frozen.trained.command]
    name = f"{kind}-{frozen.weights}-step{frozen.step:08d}-{config.dtype}{suffix or '-huggingface'}"
    path = frozen.run.path / FOLDER / name if config.output is None else Path(config.output)
    _check_place(path, suffix, frozen.run.path if config.output is None else path.parent)
    standing = standing_place(path.parent)
    with TemporaryDirectory(prefix=f".{FOLDER}-", dir=standing) as scratch:
        draft = Path(scratch) / path.name
        _module(frozen).float()  # the comparison is of rounded weights, not of half-precision arithmetic
        line = _WRITERS[config.format](made, draft, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix:
            # A process killed here leaves weights without a sidecar, never with the sidecar of other weights.
            sidecar(path).unlink(missing_ok=True)
            draft.replace(path)
            sidecar(draft).replace(sidecar(path))
        else:
            if path.exists():
                path.rename(Path(scratch) / "earlier")
            draft.rename(path)
    if made.card["left_out"]:
        logger.info("left out: %s, of pre-training alone", ", ".join(made.card["left_out"]))
    return Exported(path, line)


def sidecar(path: Path) -> Path:
    """The JSON file beside an export: ``NAME.safetensors`` -> ``NAME.safetensors.json``."""
    return path.with_name(f"{path.name}.json")


def _encoder(config: ExportConfig) -> _Encoder:
    """Load the encoder in the type of the export."""
    frozen = load_encoder(
        EvaluationConfig(
            checkpoint=config.checkpoint,
            which=config.which,
            model=config.model,
            weights=config.weights,
            data=config.data,
            data_keys=config.data_keys,
            device="cpu",
        )
    )
    if config.data is not None and frozen.path.is_dir():
        raise ConfigError(f"data describes a file of weights, and {config.checkpoint} has its own; remove data=")
    trained, classifier = frozen.trained, frozen.classifier
    head = trained.head if isinstance(trained, FinetuneConfig) else None
    if head is None and hasattr(frozen.encoder, "fc_norm"):  # a fine-tuned file, evaluated without its head
        head = HeadConfig(pooling="mean", norm="pooled")
    if config.format == "huggingface":
        huggingface.check_vit(trained.backbone)
        if head is not None:
            huggingface.check_classifier(head)
    if config.format == "huggingface_mae":
        huggingface.check_mae(trained)
        if frozen.path.is_file():
            raise ConfigError(
                f"format=huggingface_mae needs a run, and {frozen.path} is a file; use format=huggingface"
            )
    if frozen.encoder.on_grid and config.format not in _GRAPHS and trained.backbone.name != "swin":
        raise ConfigError(
            f"format={config.format} has no windows and decomposed relative positions, which the encoder of "
            f"{config.checkpoint} has (attention.*); format=torch_export and format=onnx write its whole model"
        )
    _module(frozen).to(DTYPES[config.dtype])
    encoder = frozen.encoder
    weights, of_head, classes = encoder.state_dict(), None, 0
    if classifier is not None:
        of_head, classes = classifier.head.state_dict(prefix="head."), classifier.head.out_features
    call = _call(config.format, frozen, head, classes)
    state = timm_state(weights, encoder.positions, of_head)
    card = {
        "architecture": call.architecture,
        "arguments": call.arguments,
        "pooling": "mean" if head is None else head.pooling,
        "token_grid": "x".join(map(str, encoder.grid)),
        "mean": trained.data.mean,
        "std": trained.data.std,
        "dtype": config.dtype,
        "weights": frozen.weights,
        "step": frozen.step,
        "left_out": sorted(name for name in weights if name.startswith(("mask_token", "stage"))),
        "config_sha256": hashlib.sha256(frozen.text.encode()).hexdigest(),
        "dmjd": dmjd.__version__,
        "timm": timm.__version__,
    }
    if classifier is not None:
        card["classes"] = frozen.class_labels
    if frozen.objective is not None and config.format in _GRAPHS:
        card["classes"] = list(frozen.classes)
        del card["pooling"]
    return _Encoder(frozen, config.format, shard_bytes(config.shard_size), call, state, card)


def _call(form: str, frozen: FrozenEncoder, head: HeadConfig | None, classes: int) -> TimmCall:
    """timm's model, which a graph of a classifier need not have."""
    backbone, data = frozen.trained.backbone, frozen.trained.data
    if form in _GRAPHS and head is not None:
        head = replace(head, norm="encoder")
    return timm_call(backbone, data, head, classes)


def _module(frozen: FrozenEncoder) -> nn.Module:
    return frozen.objective or frozen.classifier or frozen.encoder


def _check_place(path: Path, suffix: str, parent: Path) -> None:
    """Raise ConfigError if something is in the way of the export, or its folder is not writable."""
    other = f"set another {'file' if suffix else 'folder'} with output={'FILE' if suffix else 'FOLDER'}{suffix}"
    places = [(path.parent, True), (path, not suffix), *[(sidecar(path), False)] * bool(suffix)]
    for place, is_folder in places:
        if what := obstacle(place, folder=is_folder):
            raise ConfigError(f"{place} is {what}; move it away, or {other}")
    if not suffix and path.is_dir() and not any(path.glob(f"{WEIGHTS}*")) and any(path.iterdir()):
        raise ConfigError(f"{path} holds other files than an export; {other}")
    standing = standing_place(parent)
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise ConfigError(f"{standing} is not writable; {other}")
    if printable(str(standing)) != str(standing):
        raise ConfigError(f"{printable(str(standing))} is not UTF-8, and safetensors takes no other names; {other}")


def _write_timm(made: _Encoder, draft: Path, path: Path) -> str:
    card = made.card | {"load": made.call.line(path.name)}
    # One entry, so that the order is fixed; not save_file, whose file only its owner can read.
    draft.write_bytes(save(made.state, metadata={"dmjd": json.dumps(card)}))
    sidecar(draft).write_text(json.dumps(card, indent=1))
    _verify(_timm_model(made, checkpoint_path=str(draft)), made)
    return made.call.line(str(path))


def _write_onnx(made: _Encoder, draft: Path, path: Path) -> str:
    outputs = _outputs(made)
    names, feeds = list(outputs.outputs), ", ".join(f"{name!r}: {name}" for name in outputs.inputs)

    def line(file: str) -> str:
        run = f"{_assigned(names)} = session.run({names!r}, {{{feeds}}})"
        return f"import onnxruntime; session = onnxruntime.InferenceSession({file!r}); {run}"

    card = _graph_card(made, outputs, line(path.name))
    write_onnx(outputs, _shape(made), draft, card)
    sidecar(draft).write_text(json.dumps(card, indent=1))
    return line(str(path))


def _write_program(made: _Encoder, draft: Path, path: Path) -> str:
    outputs = _outputs(made)

    def line(file: str) -> str:
        run = f"{_assigned(outputs.outputs)} = model({', '.join(outputs.inputs)})"
        return f"import {', '.join(('torch', *outputs.needs))}; model = torch.export.load({file!r}).module(); {run}"

    card = _graph_card(made, outputs, line(path.name))
    write_program(outputs, _shape(made), draft, card)
    sidecar(draft).write_text(json.dumps(card, indent=1))
    return line(str(path))


def _outputs(made: _Encoder) -> Outputs:
    """Outputs of a graph. Raises UserError if the features of an encoder or a classifier are not finite."""
    frozen = made.frozen
    if frozen.objective is not None:
        from dmjd.evaluate.export_dense import whole_model  # imports torchvision and transformers

        return whole_model(frozen.objective, made.form)
    _sample(made)
    return Features(frozen.encoder) if frozen.classifier is None else Logits(frozen.classifier)


def _graph_card(made: _Encoder, outputs: Outputs, line: str) -> dict[str, Any]:
    """The sidecar of a graph."""
    card = {key: value for key, value in made.card.items() if key not in ("architecture", "arguments")}
    batch = 1 if outputs.traced in outputs.batches else "batch"
    inputs = {"images": [batch, *_shape(made)], **{name: [batch, 2] for name in outputs.inputs if name == "sizes"}}
    return card | {"input": inputs, "outputs": list(outputs.outputs), "load": line}


def _assigned(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) > 1 else f"({names[0]},)"


def _write_huggingface(made: _Encoder, draft: Path, path: Path) -> str:
    _verify_rebuilt(made)
    frozen, trained = made.frozen, made.frozen.trained
    if frozen.classifier is not None:
        config = huggingface.classifier_config(trained.backbone, trained.data, frozen.class_labels)
        state = huggingface.classifier_state(made.state)
        return _write_folder(made, draft, path, config, state, "AutoModelForImageClassification")
    config = huggingface.vit_config(trained.backbone, trained.data)
    return _write_folder(made, draft, path, config, huggingface.vit_state(made.state), "AutoModel")


def _write_mae(made: _Encoder, draft: Path, path: Path) -> str:
    _verify_rebuilt(made)
    trained = made.frozen.trained
    assert isinstance(trained, PretrainConfig), "huggingface.check_mae"
    objective = build_objective(trained, target_dim(trained))
    load_weights(objective, made.frozen.path)
    model = objective.model.to(DTYPES[made.card["dtype"]])
    assert isinstance(model.decoder, MAEDecoder)
    state = huggingface.mae_state(made.state, model.state_dict(), model.decoder.positions)
    return _write_folder(made, draft, path, huggingface.mae_config(trained), state, "ViTMAEForPreTraining")


def _write_folder(
    made: _Encoder, draft: Path, path: Path, config: dict[str, Any], state: dict[str, Tensor], model: str
) -> str:
    draft.mkdir()
    config["torch_dtype"] = str(DTYPES[made.card["dtype"]]).removeprefix("torch.")
    write_shards(draft / WEIGHTS, state, state.__getitem__, made.shard_size, {"format": "pt"})
    preprocessing = huggingface.preprocessor_config(made.frozen.trained.data)
    for name, content in (("config.json", config), ("preprocessor_config.json", preprocessing)):
        (draft / name).write_text(json.dumps(content, indent=2))
    (draft / CARD).write_text(_model_card(made, _transformers_line(model, path.name), _USE[model]))
    return _transformers_line(model, str(path))


def _transformers_line(model: str, path: str) -> str:
    return f"from transformers import {model}; model = {model}.from_pretrained({path!r}).eval()"


_WRITERS = {
    "timm": _write_timm,
    "onnx": _write_onnx,
    "torch_export": _write_program,
    "huggingface": _write_huggingface,
    "huggingface_mae": _write_mae,
}
"""``format`` -> writer of a draft; returns the line that loads the export from its final path."""


_USE = {
    "AutoModel": "`last_hidden_state[:, 1:]` are the patch tokens; their mean is dmjd's `pooling=mean`, and "
    "`pooler_output`,\nthe class token, is `pooling=cls`.",
    "AutoModelForImageClassification": "`model(pixel_values).logits` are the logits; `model.config.id2label` names the "
    "classes.",
    "ViTMAEForPreTraining": "`model(pixel_values, noise=noise).logits` are the predicted patches; tokens with small "
    "`noise` are visible.",
}
"""transformers' class -> what its outputs are."""


def _model_card(made: _Encoder, line: str, use: str) -> str:
    """README.md of a folder: method, data without paths, scores, licence to fill in, the line that loads it."""
    trained, frozen = made.frozen.trained, made.frozen
    height, width = trained.data.image_size
    if isinstance(trained, PretrainConfig):
        method = re.sub(r"[^\w .+-]", "", trained.method.name)
        title, tags = f"{method}, pre-trained", "masked-image-modeling, self-supervised-learning"
        first = ("method", f"{method}, target {trained.target.name}, {trained.mask.views} view(s)")
    elif frozen.classifier is None:
        title, tags = f"Encoder of dmjd {trained.command}, fine-tuned", "image-feature-extraction"
        first = ("classes", str(len(frozen.classes)))
    else:
        title, tags = f"Classifier of {len(frozen.class_labels)} classes, fine-tuned", "image-classification"
        first = ("classes", str(len(frozen.class_labels)))
    rows = [
        first,
        ("backbone", f"ViT, {trained.backbone.depth} blocks of width {trained.backbone.embed_dim}"),
        ("patch", f"{trained.backbone.patch_size} pixels"),
        ("images", f"{trained.data.name}, {height}x{width}, {trained.data.channels} channel(s)"),
        ("normalisation", f"mean {trained.data.mean}, std {trained.data.std} of pixels in 0..1"),
        ("weights", f"{made.card['weights']}, step {frozen.step} ({trained.epochs} epochs in all)"),
        *_scores(made),
    ]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "license: other  # replace by the licence of these weights",
            f"tags: [{tags}, dmjd]",
            "---",
            "",
            f"# {title} with dmjd {dmjd.__version__}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "Load it with:",
            "",
            f"    {line}",
            "",
            use,
            "",
        ]
    )


def _scores(made: _Encoder) -> list[tuple[str, str]]:
    """Top-1 scores of these weights on the held-out images of the run, as rows of the model card with conditions."""
    rows = []
    own, data = made.frozen.source, made.frozen.data
    images = {"data": own, "crop_pct": data.crop_pct, "mean": data.mean, "std": data.std}
    folder = made.frozen.run.evaluations
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            record = parse_json(read_file(file))
            same = (record["weights"], record["step"]) == (made.card["weights"], made.frozen.step)
            verb, top1, settings = str(record["verb"]), float(record["top1"]), dict(record["settings"])
            beside = [f"{key} {float(record[key]):.2f} %" for key in BASELINES if record.get(key) is not None]
            beside += [f"{int(record['test_images'])} test images"] * ("test_images" in record)
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if same and verb.isidentifier() and images.items() <= settings.items():
            conditions = {key: value for key, value in settings.items() if key not in images and key.isidentifier()}
            beside += [
                f"{key.replace('_', ' ')} {value}"
                for key, value in conditions.items()
                if isinstance(value, int | float) or str(value).isidentifier()
            ]
            rows.append((f"{verb} top-1", f"{top1:.2f} %" + f" ({', '.join(beside)})" * bool(beside)))
    return rows


def _timm_model(made: _Encoder, **options: Any) -> Any:
    return timm.create_model(made.call.architecture, **options, **made.call.arguments).eval()


def _shape(made: _Encoder) -> tuple[int, int, int]:
    """(channels, height, width) of an image."""
    height, width = made.frozen.trained.data.image_size
    return made.frozen.trained.data.channels, height, width


def _sample(made: _Encoder) -> tuple[Tensor, Tensor, Tensor]:
    """A fixed batch of images, the encoder's tokens, and the pooled features or the logits. Raises UserError if the
    tokens are not finite."""
    encoder, classifier = made.frozen.encoder, made.frozen.classifier
    images = torch.randn((2, *_shape(made)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = encoder(images)
        outputs = pool_features(encoder, tokens, "mean") if classifier is None else classifier(images)
    if not bool(tokens.isfinite().all()):
        raise UserError(
            "the encoder's features hold NaN or infinity: export an earlier checkpoint, or with dtype=fp32 or bf16"
        )
    return images, tokens, outputs


def _verify_rebuilt(made: _Encoder) -> None:
    """Verify a format that is made from the state of timm's model."""
    model = _timm_model(made)
    model.load_state_dict({name: value.float() for name, value in made.state.items()})
    _verify(model, made)


def _verify(model: Any, made: _Encoder) -> None:
    """Compare timm's tokens and its pooled features or logits of a fixed batch with ours."""
    images, *expected = _sample(made)
    with torch.no_grad():
        tokens = model.forward_features(images)
        found = (tokens.flatten(1, 2) if tokens.ndim == 4 else tokens, model(images))
    difference = max(
        float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in zip(found, expected, strict=True)
    )
    if not difference <= TOLERANCE:  # true for NaN
        raise UserError(
            f"timm {timm.__version__} computes other features from the export than the encoder (relative difference "
            f"{difference:.1e}, at most {TOLERANCE:.0e} is allowed), so no file was written"
        )
