"""Model families of transformers: their configs and blocks as ours. Imports no transformers."""

from layers.families.configs import family_config, moe_config
from layers.families.refused import REFUSED
from layers.families.table import FAMILIES

__all__ = ["FAMILIES", "REFUSED", "family_config", "moe_config"]
