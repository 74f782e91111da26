"""Training patched models with other people's loops, and what docs/TRAINING.md says of them."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

import inductor_passes
from layers import huggingface, weight_decay_groups
from tests.helpers import mixed, usually
from tests.huggingface.families import pair, tiny_model, tokens
from tests.layers.test_fsdp import mesh  # noqa: F401  # a fixture

accelerate = pytest.importorskip("accelerate")  # this module is also collected where only GPU tests run
IDS = tokens(8, 16)
DATASET = [{"input_ids": row, "labels": row} for row in IDS]


def train(model, folder, **options) -> float:
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        seed=0, learning_rate=1e-2, **options,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=DATASET).train().training_loss


@pytest.mark.parametrize(
    ("save_for_backward", "gradient_checkpointing"), mixed(("auto", "activations"), (False, True))
)
def test_trainer_reaches_the_same_weights(save_for_backward, gradient_checkpointing, tmp_path):
    stock, ours = pair("mixtral")
    huggingface.patch(ours, save_for_backward=save_for_backward)
    options = {"gradient_checkpointing": gradient_checkpointing, "weight_decay": 0.1}
    expected, actual = train(stock, tmp_path, **options), train(ours, tmp_path, **options)
    assert actual == pytest.approx(expected, rel=1e-5)
    for (name, weight), other in zip(stock.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=1e-3, atol=1e-4, msg=name)


def test_checkpointed_layers_compiled_for_every_length():
    stock, ours = pair("qwen3_moe", use_cache=False)
    huggingface.patch(ours)
    for model in (stock, ours):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (9, 13):
        ids = tokens(2, length)
        for model in (stock, compiled):
            model(ids, labels=ids).loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for (name, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_trainer_cannot_name_our_backend(tmp_path):
    model = tiny_model("mixtral")
    with pytest.raises(ValueError, match="MOE_INDUCTOR"):
        train(model, tmp_path, torch_compile=True, torch_compile_backend="moe_inductor")


def test_trainer_trains_a_model_compiled_before(tmp_path):
    ran = []

    def backend(graph_module, example_inputs):
        ours = "topk_routing" in graph_module.code
        return lambda *args: ran.append(ours) or graph_module(*args)

    eager, compiled = pair("mixtral", num_hidden_layers=1)
    huggingface.patch(eager)
    huggingface.patch(compiled)
    compiled.compile(backend=backend, fullgraph=True)
    assert train(compiled, tmp_path) == pytest.approx(train(eager, tmp_path), rel=1e-5)
    assert ran == [True] * 3


@pytest.mark.parametrize(("family", "patched"), mixed(("mixtral", "gpt_oss"), (False, True)))
def test_recording_router_logits_needs_an_eager_forward_first(family, patched):
    """transformers installs its hooks at the first one, which Dynamo cannot trace in stock models either."""
    model = tiny_model(family, implementation="grouped_mm", num_hidden_layers=1, use_cache=False)
    if patched:
        huggingface.patch(model)
    options = {"labels": IDS, "output_router_logits": True}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="context manager"):
        torch.compile(model, backend="eager", fullgraph=True)(IDS, **options)
    expected = model(IDS, **options)
    actual = torch.compile(model, backend="eager", fullgraph=True)(IDS, **options)
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.aux_loss, expected.aux_loss)


@pytest.mark.parametrize("patched", usually([False, True], [True]))
def test_adapters_on_expert_weights_break_the_graph_in_stock_models_too(patched):
    peft = pytest.importorskip("peft")
    model = tiny_model("mixtral", implementation="grouped_mm", num_hidden_layers=1, use_cache=False)
    adapters = peft.LoraConfig(
        r=2, init_lora_weights=False, target_modules=[], target_parameters=["mlp.experts.down_proj"]
    )
    model = peft.get_peft_model(model, adapters)
    if patched:
        huggingface.patch(model)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(IDS)
    torch.testing.assert_close(torch.compile(model, backend="eager")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("left_alone", [False, True])
def test_wrappers_of_parameters_are_compiled_in_each_forward_unless_left_alone(left_alone, monkeypatch):
    peft = pytest.importorskip("peft")
    model = tiny_model("mixtral", implementation="grouped_mm", num_hidden_layers=1, use_cache=False)
    options = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options))
    huggingface.patch(model)
    if left_alone:
        wrapper = peft.tuners.lora.ParamWrapper
        monkeypatch.setattr(wrapper, "forward", torch.compiler.disable(wrapper.forward))
    expected, compiled, graphs = model(IDS).logits, torch.compile(model, backend="eager"), []
    for _ in range(3):
        torch.testing.assert_close(compiled(IDS).logits, expected)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and (graphs[2] == graphs[1] == graphs[0]) == left_alone


def test_accelerate_takes_our_options(monkeypatch):
    ran = []
    monkeypatch.setattr(torch, "compile", lambda model, **given: ran.append(given) or model)
    plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor", options=inductor_passes.options())
    reset = accelerate.state.AcceleratorState._reset_state  # one for the process, and Trainer has one too
    reset(True)
    accelerate.Accelerator(cpu=True, dynamo_plugin=plugin).prepare(tiny_model("mixtral"))
    reset(True)
    ((given),) = ran
    assert given["backend"] == "inductor" and given["options"] == inductor_passes.options()


def test_trainer_does_not_decay_expert_biases(tmp_path):
    model = tiny_model("gpt_oss")
    huggingface.patch(model)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True))
    decaying = set(trainer.get_decay_parameter_names(model))
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    ours = {name_of[parameter] for parameter in weight_decay_groups(model, 0.1)[0]["params"]}
    assert {name for name in ours if ".mlp." in name} == {name for name in decaying if ".mlp." in name}
    biases = {name for name in name_of.values() if "experts" in name and "bias" in name}
    assert len(biases) == 4
    assert not biases & (ours | decaying)


@pytest.mark.parametrize("patch_first", [False, True])
def test_fully_sharded_models_train_like_plain_ones(mesh, patch_first):  # noqa: F811
    stock, ours = pair("qwen2_moe")
    if patch_first:
        huggingface.patch(ours)
    for layer in ours.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    report = huggingface.patch(ours)
    assert (len(report.experts), len(report.routers), report.left) == (2, 2, ())
    for _ in range(2):
        for model in (stock, ours):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.full_tensor(), stock.get_parameter(name), rtol=1e-3, atol=1e-5, msg=name
        )


def test_distributed_data_parallel_finds_every_gradient(mesh):  # noqa: F811
    stock, ours = pair("mixtral")
    report = huggingface.patch(replicated := DistributedDataParallel(ours))
    assert (len(report.experts), len(report.routers), report.left) == (2, 2, ())
    few = IDS[:1, :2]  # so few tokens that no expert module sees all its experts used
    for model in (stock, replicated):
        model(few, labels=few).loss.backward()
    for (name, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert actual.grad is not None, name
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert not ours.model.layers[0].mlp.experts.down_proj.grad.flatten(1).any(1).all()
