"""One optimizer step of TRL's own trainer on its own packing, for comparison; only where TRL is installed.

Same documents, same shape of model (random weights: speed does not read them), same threads, float32 masters with
bfloat16 arithmetic, and its default packing, which keeps documents apart by position ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from tempfile import TemporaryDirectory

from transformers import PreTrainedTokenizerBase

from freight.checkpoint.hf_config import config_for
from freight.config.architecture import Architecture
from freight.data.documents import Document
from freight.ops.batch import IGNORE_INDEX


def trl_step(
    arch: Architecture, documents: Sequence[Document], pack_size: int, tokenizer: PreTrainedTokenizerBase
) -> Callable[[], object] | None:
    """A function that computes one step over the documents; None if TRL is not installed."""
    if find_spec("trl") is None:
        return None
    import torch  # noqa: PLC0415 - the rest is imported only where it is used
    from datasets import Dataset  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    config = config_for(arch)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    records = Dataset.from_list(
        [{"input_ids": d.ids.tolist(), "completion_mask": d.loss_mask.astype(int).tolist()} for d in documents]
    )
    with TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            packing=True,
            max_length=pack_size,
            per_device_train_batch_size=1,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            completion_only_loss=True,
            max_steps=1,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = SFTTrainer(model=model, args=arguments, train_dataset=records, processing_class=tokenizer)
    batches = list(trainer.get_train_dataloader())
    targets = sum((batch["labels"] != IGNORE_INDEX).sum() for batch in batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        for batch in batches:
            trainer.training_step(model, dict(batch), targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
