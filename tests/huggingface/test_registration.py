"""`import layers.huggingface` is enough for the name "moe_ops", imports no transformers, and disturbs no import."""

from pathlib import Path

import pytest

from tests.forked import run_python
from tests.helpers import usually

ROOT = Path(__file__).parents[2]
BUILD = """
from transformers import MixtralConfig, MixtralForCausalLM
import torch
config = MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                       num_key_value_heads=1, num_local_experts=4, experts_implementation="moe_ops")
model = MixtralForCausalLM._from_config(config, experts_implementation="moe_ops")
assert model.config._experts_implementation == "moe_ops"
assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("layers")]
"""


def run(code: str) -> None:
    done = run_python("import sys\n" + code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_import_of_ours_first():
    run("import layers.huggingface\nassert 'transformers' not in sys.modules\n" + BUILD)


@pytest.mark.parametrize(
    "first",
    usually(
        [
            "import transformers",
            "import transformers.modeling_utils",
            "import transformers.integrations.moe",
            "from transformers import MixtralForCausalLM",
            "from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts",
        ],
        ["import transformers", "from transformers import MixtralForCausalLM"],
    ),
)
def test_import_of_transformers_first(first):
    run(f"{first}\nimport layers.huggingface\n{BUILD}")


@pytest.mark.parametrize(
    "entry",
    usually(
        [
            "import transformers.activations",
            "import transformers.integrations.hub_kernels",
            "import transformers.integrations.moe",
            "from transformers.models.gpt_oss import modeling_gpt_oss",
            "from transformers import Trainer, pipeline",
            "from transformers.generation.utils import GenerationMixin",
        ],
        ["import transformers.integrations.moe", "from transformers import Trainer, pipeline"],
    ),
)
def test_every_way_into_transformers_stays_open(entry):
    run(f"import layers.huggingface\n{entry}\n{BUILD}")


def test_from_pretrained_knows_the_name(tmp_path):
    run(
        f"""
import layers.huggingface
{BUILD}
model.save_pretrained({str(tmp_path)!r})
loaded = MixtralForCausalLM.from_pretrained({str(tmp_path)!r}, experts_implementation="moe_ops")
assert loaded.config._experts_implementation == "moe_ops"
ids = torch.tensor([[1, 2, 3]])
torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)
"""
    )


def test_a_pickled_model_brings_the_registration_along(tmp_path):
    path = str(tmp_path / "model.pickle")
    run(
        f"""
import layers.huggingface
{BUILD}
layers.huggingface.patch(model)
torch.save(model, {path!r})
"""
    )
    run(
        f"""
import torch
model = torch.load({path!r}, weights_only=False)
assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
"""
    )


def test_an_older_transformers_can_still_be_imported(tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modeling_utils.py").write_text("READY = True")
    run(
        f"""
sys.path.insert(0, {str(tmp_path)!r})
import layers.huggingface
import transformers.modeling_utils
assert transformers.modeling_utils.READY
try:
    layers.huggingface.register()
except ImportError:
    sys.exit(0)
sys.exit("no error")
"""
    )
