"""This package reads and writes published MoE models: their config.json, and the weights of their MoE layers.

    config = moax.hf.config_from_hf(folder)
    params = moax.hf.params_from_hf(folder, config, layer=3)            # reads one expert at a time
    moax.hf.save_hf(out, {3: params}, config, others=moax.hf.Checkpoint(folder))

`MODEL_TYPES` has the values of `model_type` that it knows, and `IMPOSSIBLE` says of the other MoE models of
transformers why it does not. The safetensors files have one tensor for each expert, or stacked experts.
"""

from moax.hf.config import config_from_hf as config_from_hf
from moax.hf.config import config_to_hf as config_to_hf
from moax.hf.config import moe_layers as moe_layers
from moax.hf.families import MODEL_TYPES as MODEL_TYPES
from moax.hf.files import Checkpoint as Checkpoint
from moax.hf.impossible import IMPOSSIBLE as IMPOSSIBLE
from moax.hf.save import params_to_hf as params_to_hf
from moax.hf.save import save_hf as save_hf
from moax.hf.weights import params_from_hf as params_from_hf
