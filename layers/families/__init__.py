"""Model families of transformers: their configs and blocks as ours. Imports no transformers."""

from layers.families.configs import FAMILIES, moe_config
from layers.families.refused import REFUSED

__all__ = ["FAMILIES", "REFUSED", "moe_config"]
