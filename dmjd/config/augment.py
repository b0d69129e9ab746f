"""Augmentation of fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from dmjd.config.fields import naming, number


@dataclass
class AugmentConfig:
    """Augmentation and label smoothing of fine-tuning, as in timm (docs/data.md).

    randaugment: RandAugment policy in timm's notation: rand, then sections of m (magnitude), n (operations per image),
        p (probability of each), mstd (deviation of the magnitude), mmax, inc and t. null: off.
    mixup: Alpha of mixup's Beta(alpha, alpha), at least 0.001. 0: off.
    cutmix: Alpha of cutmix's Beta(alpha, alpha), at least 0.001. 0: off.
    mix_prob: Probability that a pair of images is mixed.
    mix_switch_prob: Probability of cutmix in place of mixup where both are on.
    smoothing: Label smoothing.
    erase_prob: Probability of random erasing, per image. Rectangles are filled with normal noise.
    erase_count: Maximum number of rectangles that random erasing fills in an image.
    """

    randaugment: str | None = naming("rand-m9-mstd0.5-inc1", "a policy, or be null for none")
    mixup: float = number(0.8, least=0, most=100)
    cutmix: float = number(1.0, least=0, most=100)
    mix_prob: float = number(1.0, least=0, most=1)
    mix_switch_prob: float = number(0.5, least=0, most=1)
    smoothing: float = number(0.1, least=0, below=1)
    erase_prob: float = number(0.25, least=0, most=1)
    erase_count: int = number(1, least=1, most=100)
