"""One layout of files of weights: names, shapes, container; reading to our names and writing from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.interop.names import (
    BIAS_TABLE,
    HEAD,
    POSITIONS,
    SHARED_TABLE,
    Names,
    missing,
    summary,
)
from dmjd.interop.tensors import join_qv_bias, split_qv_bias

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

    def is_complete(self, state: State) -> bool:
        """Whether :meth:`read` would miss no name of this layout."""
        return not missing(ours for name in self._prepared(state) if (ours := self._ours(name)) is not None)

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
        check_stem(unknown)
        absent = [self.names.theirs(name) or name for name in missing(weights)]
        faults = list[str]()
        if unknown and not drop_unknown:
            faults.append(f"{len(unknown)} unknown ({summary(unknown)}; {advice(unknown, 'unknown=drop')})")
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
    """Raise CheckpointError with the names of tensors that hold NaN or infinity in float32, in which models compute."""
    bad = [name for name, value in state.items() if not bool(value.float().isfinite().all())]
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
_BESIDE_ENCODER = re.compile(
    r"^(decoder|neck|([a-z]+_)*head|projector|predictor|loss|pyramid|auxiliary|rpn|box_|mask_logits|proposal_generator)"
)


def advice(unknown: Sequence[str], argument: str) -> str:
    """The cure for unknown names: ``argument``, unless features of whole images depend on one of them."""
    needed = [name for name in unknown if _FEATURES_DEPEND.search(name) and not _BESIDE_ENCODER.match(name)]
    if needed:
        return f"features depend on {summary(needed)}, so no layout here can hold this model; use its own code"
    return f"dmjd convert with {argument} leaves them out"


def check_stem(unknown: Sequence[str]) -> None:
    """Raise CheckpointError if an unknown name is of a patch embedding by several layers, which no encoder here has."""
    stem = next(filter(_STEM.search, unknown), None)
    if stem is not None:
        raise CheckpointError(
            f"it embeds patches by several convolutions ({stem}), as XCiT and MoCo v3's vit_conv_small and "
            "vit_conv_base, and the encoders of dmjd by one; use the model's own code"
        )
