"""Checkpoint layouts of code bases: names, shapes, container; reading to our names and writing from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.interop.names import (
    BEIT,
    BIAS_TABLE,
    CLASSIFIER,
    CONVIT,
    DECODER,
    HEAD,
    POSITIONS,
    SHARED_TABLE,
    SWIN,
    TIMM_VIT,
    VISIBLE_BRANCH,
    VIT,
    VOCABULARY,
    Names,
    missing,
    summary,
)
from dmjd.interop.tensors import channels_first, channels_last, join_qv_bias, split_qv_bias

State = Mapping[str, Tensor]
Hook = Callable[[dict[str, Tensor]], dict[str, Tensor]]

_BUFFERS = re.compile(
    r"(^|\.)(relative_position_index|attn_mask)$|^hogs\.\d+\.|^data_preprocessor\.|^target_generator\."
)
"""Buffers that are not weights of the model: index tables, fixed kernels, statistics, frozen teachers."""


class Written(NamedTuple):
    """state: in the layout's names. left_out: our names of weights that the layout does not have and does not need."""

    state: dict[str, Tensor]
    left_out: list[str]


def _as_is(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state


@dataclass(frozen=True)
class Layout:
    """The layout of one code base's files of weights.

    names: of all weights that its files may hold.
    container: the key of the state in a .pth file, None for a bare state.
    qv_bias: whether q and v have separate biases instead of the fused one: "never"; "always", in a ViT; or "beit", in
        a ViT with relative position biases or layer scales, which is another class there.
    after_reading, before_writing: changes of shapes and places, on the state in its own names.
    head: whether the head of our weights belongs to this layout, apart from the decoder in front of it.
    other_networks: a pattern of names of networks that train beside the encoder and have no place among our names, such
        as CAE's regressor; they are left out.
    """

    name: str
    names: Names
    container: str | None = "model"
    qv_bias: str = "never"
    after_reading: Hook = _as_is
    before_writing: Hook = _as_is
    head: Callable[[State], bool] = lambda weights: True
    other_networks: re.Pattern[str] | None = None

    def unknown(self, state: State) -> list[str]:
        """Names in ``state`` that are neither in this layout nor known buffers."""
        return [name for name in self._prepared(state) if self._ours(name) is None]

    def left_out(self, state: State) -> list[str]:
        """The :attr:`other_networks` in ``state``, for messages: ``pretext_neck.*`` for all that begins so."""
        found = [self.other_networks.match(name) for name in state] if self.other_networks else []
        starts = [match[0] for match in found if match]
        return [f"{start}*" if start.endswith(".") else start for start in dict.fromkeys(starts)]

    def read(self, state: State, *, drop_unknown: bool = False, keep_nonfinite: bool = False) -> dict[str, Tensor]:
        """``state`` under our names.

        Raises:
            CheckpointError: with all unknown names (unless ``drop_unknown``) and all missing ones, or with the weights
                that hold NaN or infinity (unless ``keep_nonfinite``).
        """
        weights: dict[str, Tensor] = {}
        unknown = []
        prepared = self._prepared(state)
        for name, value in prepared.items():
            ours = self._ours(name)
            if ours is None:
                unknown.append(name)
            else:
                weights[ours] = value
        _check_stem(unknown)
        absent = [self.names.theirs(name) or name for name in missing(weights)]
        faults = []
        if unknown and not drop_unknown:
            faults.append(f"{len(unknown)} unknown ({summary(unknown)}; {_advice(unknown, 'unknown=drop')})")
        if absent:
            faults.append(f"{len(absent)} missing ({summary(absent)})")
        if not weights:
            faults.append("no weights")
        if faults:
            raise CheckpointError(f"read as {self.name}, the file has {' and '.join(faults)}")
        if not keep_nonfinite:
            check_finite({name: value for name, value in prepared.items() if name not in unknown})
        return weights

    def write(self, weights: State) -> Written:
        """``weights`` under this layout's names.

        Raises:
            CheckpointError: if the encoder needs a weight that this layout does not have.
        """
        weights, left_out = dict(weights), []
        if self.qv_bias == "always" or (self.qv_bias == "beit" and is_beit(weights)):
            weights, of_keys = split_qv_bias(weights, "encoder.blocks.")
            left_out = [f"{name} of k, to which softmax is invariant" for name in of_keys]
        homeless = [name for name in weights if self._place(name) is None]
        if not self.head(weights) or any(name.startswith("decoder.") for name in homeless):
            # The head has another input or output here: a decoder's features, or no pixels.
            homeless += [name for name in HEAD if name in weights and name not in homeless]
        needed = [name for name in homeless if needed_by_encoder(name)]
        if needed:
            raise CheckpointError(
                f"the layout of {self.name} has no place for {summary(needed)}, which the encoder's features depend on"
            )
        placed = {
            place: value
            for name, value in weights.items()
            if name not in homeless and (place := self._place(name)) is not None
        }
        return Written(self.before_writing(placed), left_out + homeless)

    def _ours(self, theirs: str) -> str | None:
        ours = self.names.ours(theirs)
        # Swin's authors merge patches at the end of a layer, timm and we at the start: their layers.0 is our layers.1.
        return None if ours is not None and ours.startswith("encoder.layers.0.downsample.") else ours

    def _place(self, ours: str) -> str | None:
        stem, _, leaf = ours.rpartition(".")
        if leaf not in ("q_bias", "v_bias"):
            return self.names.theirs(ours)
        fused = self.names.theirs(f"{stem}.qkv.bias")  # q_bias and v_bias replace it
        return fused and fused.removesuffix("qkv.bias") + leaf

    def _prepared(self, state: State) -> dict[str, Tensor]:
        others = self.other_networks
        state = state if others is None else {name: value for name, value in state.items() if not others.match(name)}
        weights = {name: value for name, value in state.items() if not _BUFFERS.search(name)}
        return self.after_reading(join_qv_bias(weights) if self.qv_bias != "never" else weights)


def is_beit(weights: State) -> bool:
    """Whether a ViT has weights that only the BEiT classes of timm and mmpretrain have."""
    return any(
        name == SHARED_TABLE
        or (name.startswith("encoder.blocks.") and (name.endswith(BIAS_TABLE) or name.endswith("gamma_1")))
        for name in weights
    )


def lacks_positions(weights: State) -> bool:
    """Whether a ViT has neither positions nor relative position biases. Our own files alone leave fixed ones out."""
    tables = (POSITIONS, SHARED_TABLE, f"encoder.blocks.0.{BIAS_TABLE}")
    return "encoder.blocks.0.norm1.weight" in weights and not any(name in weights for name in tables)


def needed_by_encoder(name: str) -> bool:
    """Whether features of whole images depend on this weight."""
    return name.startswith("encoder.") and not re.match(r"encoder\.(mask_token|stage\d_output_decode)", name)


def check_finite(state: State) -> None:
    """Raise CheckpointError with the names of tensors that hold NaN or infinity."""
    bad = [name for name, value in state.items() if not bool(value.isfinite().all())]
    if bad:
        raise CheckpointError(
            f"NaN or infinity in {summary(bad)}, as after a training that diverged: use an earlier checkpoint (dmjd "
            "convert copies such weights with nonfinite=keep)"
        )


_FEATURES_DEPEND = re.compile(
    r"(^|\.)(blocks?\d?|layers?|resblocks|stages?)\.\d|"
    r"(^|[._])(cls|class|dist|reg|registers?|storage|pos|positional|patch|rope|freqs|embed|embedding|norm|ln)([._\d]|$)"
)
_STEM = re.compile(r"(^|\.)patch_embed\.proj\.\d+\.")
_BESIDE_ENCODER = re.compile(r"^(decoder|neck|head|dino_head|ibot_head|projector|projection_head|predictor|loss)")


def _advice(unknown: Sequence[str], argument: str) -> str:
    """The cure for unknown names: ``argument``, unless features of whole images depend on one of them."""
    needed = [name for name in unknown if _FEATURES_DEPEND.search(name) and not _BESIDE_ENCODER.match(name)]
    if needed:
        return f"features depend on {summary(needed)}, so no layout here can hold this model; use its own code"
    return f"dmjd convert with {argument} leaves them out"


def _check_stem(unknown: Sequence[str]) -> None:
    stem = next(filter(_STEM.search, unknown), None)
    if stem is not None:
        raise CheckpointError(
            f"it embeds patches by several convolutions ({stem}), as XCiT and MoCo v3's vit_conv_small and "
            "vit_conv_base, and the encoders of dmjd by one; use the model's own code"
        )


def _renamed(vocabulary: Sequence[str], *rules: tuple[str, str]) -> Names:
    """Our names under (pattern, replacement) rules, applied one after the other."""
    pairs = {}
    for ours in vocabulary:
        theirs = ours
        for pattern, replacement in rules:
            theirs = re.sub(pattern, replacement, theirs)
        pairs[theirs] = ours
    return Names(pairs)


_TOP = (r"^encoder\.", "")
_FINE_TUNED = (r"^classifier\.", "head.")


def _official(vocabulary: Sequence[str]) -> Names:
    """The names of MAE, ConvMAE and DMJD, whose shapes are ours."""
    return _renamed(
        [*vocabulary, *CLASSIFIER],
        (r"^decoder\.mask_token$", "mask_token"),
        (r"^decoder\.", "decoder_"),
        (r"^head\.", "decoder_pred."),
        (r"^visible_branch\.projector\.", "proj_embed."),
        (r"^visible_branch\.predictor\.", "predictor.0."),
        _TOP,
        _FINE_TUNED,
    )


def _from_simmim(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's 1 x 1 convolution to a matrix in our order of pixels; Swin's patch merging to the layer after it.

    A fine-tuned Swin, as Swin's authors store theirs, has no prefix.
    """
    if "layers.0.downsample.reduction.weight" in state:
        state = {name if name.startswith("head.") else f"encoder.{name}": value for name, value in state.items()}
    state = {_moved(name, +1): value for name, value in state.items()}
    return _reordered(
        state, lambda value, channels: channels_last(value.flatten(1) if value.ndim > 1 else value, channels)
    )


def _to_simmim(state: dict[str, Tensor]) -> dict[str, Tensor]:
    def convolution(value: Tensor, channels: int) -> Tensor:
        rows = channels_first(value, channels)
        return rows[:, :, None, None] if rows.ndim > 1 else rows

    state = {_moved(name, -1): value for name, value in state.items()}
    if "head.weight" in state:
        return {name.removeprefix("encoder."): value for name, value in state.items()}
    return _reordered(state, convolution)


def _moved(name: str, by: int) -> str:
    return re.sub(
        r"^encoder\.layers\.(\d+)\.downsample\.",
        lambda found: f"encoder.layers.{int(found[1]) + by}.downsample.",
        name,
    )


def _reordered(state: dict[str, Tensor], order: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
    if not _predicts_pixels(state, "decoder.0.weight"):  # an incomplete file, which read() rejects, or another model
        return state
    channels = state[_EMBEDDING].shape[1]
    return {name: order(value, channels) if name.startswith("decoder.0.") else value for name, value in state.items()}


_EMBEDDING = "encoder.patch_embed.proj.weight"


def _predicts_pixels(state: State, head: str = "head.weight") -> bool:
    """Whether a head has a row for every value of a token's pixels; each patch merging doubles the token's side."""
    embedding, weight = state.get(_EMBEDDING), state.get(head)
    if embedding is None or embedding.ndim != 4 or weight is None or weight.ndim < 2:
        return False
    merged = sum(name.endswith(".downsample.reduction.weight") for name in state)
    return weight.shape[0] == embedding[0].numel() * 4**merged


_PREDICTOR_NORM = "pred_head.transforms.0.0."


def _from_maskfeat(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """In pre-training the last norm of the encoder is stored as the first of the head."""
    return {re.sub(r"^norm\.", _PREDICTOR_NORM, name): value for name, value in state.items()}


def _to_maskfeat(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if "pred_head.projections.0.weight" in state:
        return state
    return {name.replace(_PREDICTOR_NORM, "norm."): value for name, value in state.items()}


_MMPRETRAIN_BLOCKS = (
    (r"\.mlp\.fc1\.", ".ffn.layers.0.0."),
    (r"\.mlp\.fc2\.", ".ffn.layers.1."),
    (r"\*\.norm([12])\.", r"*.ln\1."),
)


def _mmpretrain() -> Names:
    """MAE's decoder is the neck. :func:`_from_mmpretrain` renames BEiT's classifier and MaskFeat's linear layer."""
    return _renamed(
        [*VIT, *BEIT, *DECODER, *HEAD, *CLASSIFIER],
        *_MMPRETRAIN_BLOCKS,
        (r"^encoder\.blocks\.", "backbone.layers."),
        (r"^encoder\.norm\.", "backbone.ln1."),
        (r"^encoder\.fc_norm\.", "backbone.ln2."),
        (r"^encoder\.patch_embed\.proj\.", "backbone.patch_embed.projection."),
        (r"^encoder\.", "backbone."),
        (r"^decoder\.norm\.", "neck.ln1."),
        (r"^decoder\.mask_token$", "neck.mask_token"),
        (r"^decoder\.", "neck.decoder_"),
        (r"^head\.", "neck.decoder_pred."),
        (r"^classifier\.", "head.fc."),
    )


_CODES, _LINEAR, _PRED = "head.cls_head.", "neck.fc.", "neck.decoder_pred."


def _from_mmpretrain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(name.startswith("neck.decoder_") for name in state):  # CAE's regressor has a mask token, too
        state = {name: value for name, value in state.items() if name != "neck.mask_token"}
    return {
        re.sub(rf"^({re.escape(_CODES)}|{re.escape(_LINEAR)})", _PRED, name): value for name, value in state.items()
    }


def _to_mmpretrain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if "neck.decoder_embed.weight" in state:
        return state
    beit = any(name.endswith((BIAS_TABLE, "rel_pos_bias.relative_position_bias_table")) for name in state)
    return {name.replace(_PRED, _CODES if beit else _LINEAR): value for name, value in state.items()}


def _from_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's Swin has its classifier inside of a head with pooling."""
    return {re.sub(r"^head\.fc\.", "head.", name): value for name, value in state.items()}


def _to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(name.startswith("layers.") for name in state):
        return state
    return {re.sub(r"^head\.", "head.fc.", name): value for name, value in state.items()}


_OF_DINO = re.compile(r"head\.(mlp|last_layer)\.")
_OF_IBOT = re.compile(r"head\.(mlp|last_layer|last_norm)2?\.")
"""Projection heads."""
_OF_MOCOV3 = re.compile(r"(base_encoder\.)?head\.(?=\d+\.)|predictor\.")
"""Projection and prediction networks."""


def _from_mocov3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("base_encoder."): value for name, value in state.items()}


def _to_mocov3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prefix that its main_lincls.py and convert_to_deit.py expect."""
    return {f"module.base_encoder.{name}": value for name, value in state.items()}


def _from_ibot(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A student's mask token ``[1, D]`` as ``[1, 1, D]``."""
    return {name: value[None] if name == _IBOT_MASK and value.ndim == 2 else value for name, value in state.items()}


def _to_ibot(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[0] if name == _IBOT_MASK else value for name, value in state.items()}


_IBOT_MASK = "masked_embed"
_PLAIN_VIT = [name for name in VIT if "mask_token" not in name and "fc_norm" not in name]


_OF_CAE = re.compile(
    r"mask_token$|(pretext_neck|encoder_to_decoder(_norm)?|teacher)\.|"  # lxtGH/CAE
    r"rd_pos_embed$|(regresser|encoder_to_regresser(_norm)?|alignment_encoder)\.|"  # Atten4Vis/CAE
    r"decoder\.(?=(decoder_blocks|norm|head)\.)"
)
"""Networks of CAE's pre-training: regressor, decoder, and the encoder that sees the masked patches."""


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("ours", Names({name: name for name in VOCABULARY}), container=None, qv_bias="beit"),
        Layout("mae", _official([*(name for name in VIT if "mask_token" not in name), *DECODER, *HEAD])),
        Layout("convmae", _official([*CONVIT, *DECODER, *HEAD])),
        Layout("dmjd", _official([*dict.fromkeys([*CONVIT, *VIT[:1], *VIT[2:]]), *DECODER, *HEAD, *VISIBLE_BRANCH])),
        Layout(
            "simmim",
            _renamed(
                [*dict.fromkeys([*VIT, *BEIT, *SWIN]), *HEAD, *CLASSIFIER], (r"^head\.", "decoder.0."), _FINE_TUNED
            ),
            qv_bias="always",
            after_reading=_from_simmim,
            before_writing=_to_simmim,
            head=_predicts_pixels,
        ),
        Layout(
            "beit",
            _renamed([*VIT, *BEIT, *HEAD, *CLASSIFIER], _TOP, (r"^head\.", "lm_head."), _FINE_TUNED),
            qv_bias="always",
        ),
        Layout("dino", _renamed(_PLAIN_VIT, _TOP), container=None, other_networks=_OF_DINO),
        Layout(
            "ibot",
            _renamed([*_PLAIN_VIT, "encoder.mask_token"], _TOP, (r"^mask_token$", _IBOT_MASK)),
            container="state_dict",
            after_reading=_from_ibot,
            before_writing=_to_ibot,
            other_networks=_OF_IBOT,
        ),
        Layout(
            "mocov3",
            _renamed(_PLAIN_VIT, _TOP),
            container="state_dict",
            after_reading=_from_mocov3,
            before_writing=_to_mocov3,
            other_networks=_OF_MOCOV3,
        ),
        Layout(
            "cae",
            Names({name: name for name in [*VIT, *BEIT] if "mask_token" not in name and "fc_norm" not in name}),
            qv_bias="always",
            other_networks=_OF_CAE,
        ),
        Layout(
            "maskfeat",
            _renamed(
                [*(name for name in VIT if "fc_norm" not in name), *HEAD, *CLASSIFIER],
                (r"^encoder\.norm\.", _PREDICTOR_NORM),
                _TOP,
                (r"^head\.", "pred_head.projections.0."),
                (r"^classifier\.", "head.projection."),
            ),
            container="model_state",
            after_reading=_from_maskfeat,
            before_writing=_to_maskfeat,
        ),
        Layout(
            "mmpretrain",
            _mmpretrain(),
            container="state_dict",
            qv_bias="beit",
            after_reading=_from_mmpretrain,
            before_writing=_to_mmpretrain,
            other_networks=re.compile(
                r"(neck\.(regressors|decoders|norm_regressor|norm_decoder|head)|teacher)\."
            ),  # CAE
        ),
        Layout(
            "timm",
            _renamed(
                [
                    name
                    for name in dict.fromkeys([*VIT, *TIMM_VIT, *BEIT, *CONVIT, *SWIN, *CLASSIFIER])
                    if "mask_token" not in name and "_output_decode" not in name
                ],
                _TOP,
                _FINE_TUNED,
            ),
            container=None,
            qv_bias="beit",
            after_reading=_from_timm,
            before_writing=_to_timm,
        ),
    )
}


def detect(state: State, beside: Sequence[str] = ()) -> tuple[Layout, list[str]]:
    """The first layout that has every name in ``state``, and the names of all layouts that do.

    They agree then: MAE's encoder and timm's ViT, for example, have the same names and shapes. Layouts whose
    ``other_networks`` are those ``beside`` the state are preferred: DINO's by its projection head.

    Raises:
        CheckpointError: if there is none, with the names that the nearest layout does not have.
    """
    unknown = {name: layout.unknown(state) for name, layout in LAYOUTS.items()}
    fitting = [name for name, rest in unknown.items() if not rest]
    if fitting:
        networks = {name: LAYOUTS[name].other_networks for name in fitting if beside}
        theirs = [name for name, found in networks.items() if found is not None and all(map(found.match, beside))]
        fitting = theirs or fitting
        return LAYOUTS[fitting[0]], fitting
    nearest = min(unknown, key=lambda name: len(unknown[name]))
    _check_stem(unknown[nearest])
    if len(unknown[nearest]) == len(LAYOUTS[nearest]._prepared(state)):
        raise CheckpointError(
            f"no layout has all of these names, nor any: {summary(state)}; encoders here are ViT, ConvViT and Swin, "
            f"the layouts {', '.join(LAYOUTS)}; use the model's own code"
        )
    raise CheckpointError(
        f"no layout has all of these names; the nearest is {nearest}, which does not know {len(unknown[nearest])} of "
        f"{len(state)}: {summary(unknown[nearest])}; {_advice(unknown[nearest], f'source={nearest} unknown=drop')}; "
        f"the layouts are {', '.join(LAYOUTS)}"
    )


_PREFIXES = ("encoder.", "backbone.", "base_encoder.", "visual.", "vit.", "model.", "net.")


_IN_FRONT = re.compile(r"([^.]+\.)(?:.*\.)?patch_embed")
"""A prefix of an encoder."""
_MOST_PREFIXES = 4


def peel(state: State, most: int = _MOST_PREFIXES) -> tuple[dict[str, Tensor], list[str]]:
    """``state`` without a prefix such as ``backbone.`` in front of a layout's names, and the names beside it.

    Up to ``most`` prefixes may be stacked. A state that a layout has as it is, or that has no prefix, is unchanged, as
    is one with several encoders under prefixes that are not known.
    """
    others = dict.fromkeys(found[1] for name in state if (found := _IN_FRONT.match(name)) and found[1] not in _PREFIXES)
    for prefixes in (_PREFIXES, others) if most else ():
        fitting = [peeled for prefix in prefixes if (peeled := _without(state, prefix, most)) is not None]
        if fitting and (prefixes is _PREFIXES or len(fitting) == 1):
            return fitting[0]
    return dict(state), []


def _without(state: State, prefix: str, most: int) -> tuple[dict[str, Tensor], list[str]] | None:
    """``state`` as :func:`peel` gives it, if it is to be peeled of ``prefix``."""
    inner = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if not inner or not all(layout.unknown(_prefixed(inner, prefix)) for layout in LAYOUTS.values()):
        return None
    inner, left_out = peel(inner, most - 1)
    if all(layout.unknown(inner) for layout in LAYOUTS.values()):
        return None
    return inner, left_out + [name for name in state if not name.startswith(prefix)]


def _prefixed(state: State, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}
