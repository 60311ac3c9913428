"""Models of transformers and of peft on published memory: the same numbers, tied where they are tied."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import vram

torch = pytest.importorskip("torch", reason="could not import 'torch'")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
peft: Any = pytest.importorskip("peft", reason="peft is not installed")

transformers.utils.logging.disable_progress_bar()  # it has a thread
# peft calls what transformers will remove.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
TEXT = {"input_ids": torch.arange(8)[None]}


@pytest.fixture(autouse=True)
def keeper() -> Iterator[None]:
    with vram.private_keeper():
        yield
        gc.collect()


def bert() -> Any:
    return transformers.AutoModel.from_config(transformers.BertConfig(**SMALL))


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config)


def llama_in_16_bits() -> Any:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def experts() -> Any:
    config = transformers.Qwen2MoeConfig(
        **SMALL, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def t5() -> Any:
    config = transformers.T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, vocab_size=96)
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


def resnet() -> Any:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    return transformers.AutoModelForImageClassification.from_config(config)


def adapted() -> Any:
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "bert": (bert, TEXT),
    "llama": (llama, TEXT),
    "llama in 16 bits": (llama_in_16_bits, TEXT),
    "experts": (experts, TEXT),
    "t5": (t5, {**TEXT, "decoder_input_ids": torch.arange(4)[None]}),
    "resnet": (resnet, {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)}),
    "adapted": (adapted, TEXT),
}


def answer(model: Any, given: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(**given)[0]


def ties(model: Any) -> set[tuple[str, ...]]:
    """Return the names of each parameter."""
    named: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    return {tuple(names) for names in named.values()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_attached_answers_as_the_published_one(name: str) -> None:
    make, given = MODELS[name]
    torch.manual_seed(3)
    published = make().eval()
    vram.publish("m", published)
    with vram.attach("m") as lease:
        made = lease.module(make)
    assert torch.equal(answer(made, given), answer(published, given))
    assert ties(made) == ties(published)


def test_an_adapter_of_ones_own_trains_on_a_shared_model() -> None:
    vram.publish("m", llama())
    with vram.attach("m") as lease:
        base = lease.module(llama)
        before = {name: tensor.clone() for name, tensor in lease.torch().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trained = [one for one in model.parameters() if one.requires_grad]
    assert trained
    optimizer = torch.optim.SGD(trained, lr=0.1)
    first = model(**TEXT, labels=TEXT["input_ids"]).loss
    first.backward()
    optimizer.step()
    assert model(**TEXT, labels=TEXT["input_ids"]).loss < first
    with vram.attach("m") as lease:
        assert all(torch.equal(before[name], tensor) for name, tensor in lease.torch().items())


def test_from_pretrained_takes_the_tensors_of_a_lease() -> None:
    published = experts().eval()
    vram.publish("m", published)
    with vram.attach("m") as lease:
        tensors = lease.torch()
        kind = type(published)
        made = kind.from_pretrained(None, config=published.config, state_dict=tensors, dtype="auto")
        assert made.lm_head.weight.data_ptr() == tensors["lm_head.weight"].data_ptr()
    assert torch.equal(answer(made, TEXT), answer(published, TEXT))


def test_a_trainer_updates_what_others_have_attached(tmp_path: Any) -> None:
    from vram.engines.transformers import PublishCallback

    model = llama()
    seen: list[tuple[int, bool]] = []

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        """Stands for a rollout process that looks after each step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with vram.attach("policy") as lease, lease.reading() as version:
                served = lease.module(llama)
                seen.append((version, torch.equal(answer(served, TEXT), answer(model.eval(), TEXT))))
            model.train()

    rows = [{"input_ids": TEXT["input_ids"][0], "labels": TEXT["input_ids"][0]}] * 6
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=5, per_device_train_batch_size=1, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, learning_rate=0.1,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=options, train_dataset=rows, callbacks=[PublishCallback("policy", every=2), Look()]
    )
    trainer.train()
    assert seen == [(1, False), (2, True), (2, False), (3, True), (3, False)]
    with vram.attach("policy") as lease:
        assert torch.equal(answer(lease.module(llama), TEXT), answer(model.eval(), TEXT)), "the last step's"
    vram.remove("policy")


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_a_callback_takes_a_number_of_steps(every: Any) -> None:
    from vram.engines.transformers import PublishCallback

    with pytest.raises(vram.errors.UsageError, match="number of steps"):
        PublishCallback("policy", every=every)
