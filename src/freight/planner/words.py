"""A plan in words: what a configuration means, one sentence a line, with the arithmetic shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from freight.config.data_checks import algorithm, reads_packed
from freight.data.pack.batch_size import batch_size_sentence
from freight.ops.attention_backends import Choice
from freight.planner.execution_words import execution_words
from freight.planner.plan import Plan


def plan_words(plan: Plan) -> list[str]:
    """The plan, one sentence a line."""
    return [
        *_model_words(plan),
        *_adapter_words(plan),
        *execution_words(plan.execution, plan.config, plan.hardware.device),
        *_data_words(plan),
        *_step_words(plan),
        *_train_words(plan),
    ]


def _model_words(plan: Plan) -> Iterator[str]:
    arch = plan.arch
    total = _trained(plan) + plan.frozen.parameters
    source = plan.config.model.hf or plan.config.model.preset
    with_adapter = " with the adapter" if plan.adapted is not None else ""
    groups = "" if arch.groups == arch.num_attention_heads else f" over {arch.groups} KV heads"
    yield (
        f"model: {count(total)} parameters{with_adapter}{f' ({source})' if source else ''}: {arch.num_layers} layers, "
        f"hidden {arch.hidden_size}, {arch.num_attention_heads} heads of {arch.dims_per_head}{groups}, vocabulary "
        f"{arch.vocab_size:,}, {arch.max_position_embeddings:,} positions"
    )
    dtype = plan.config.train.precision
    where = plan.hardware.device + (f" sm{plan.hardware.capability}" if plan.hardware.capability else "")
    packed = (
        f"; {plan.packed_attention.forward.name} for packed rows" if plan.packed_attention != plan.attention else ""
    )
    window = f"; window {arch.sliding_window}" if arch.sliding_window else ""
    kind = f"({dtype}, head_dim {arch.dims_per_head}, {where})"
    yield f"attention: {_kernel_words(plan.attention)} {kind}{packed}{window}; documents never see each other"


def _adapter_words(plan: Plan) -> Iterator[str]:
    adapter, adapted = plan.config.adapter, plan.adapted
    if adapter is None or adapted is None:
        return
    kinds = ", ".join(dict.fromkeys(module.rsplit(".", 1)[-1] for module in adapted.lora))
    scale, how = adapter.alpha / adapter.rank, "alpha / rank"
    if adapter.use_rslora:
        scale, how = adapter.alpha / adapter.rank**0.5, "alpha / sqrt(rank)"
    layers = "" if adapter.layers is None else f" of layers {', '.join(map(str, adapter.layers))}"
    yield (
        f"adapter: {'DoRA' if adapter.use_dora else 'LoRA'} of rank {adapter.rank}, scale {scale:g} ({how}), on "
        f"{_many(len(adapted.lora), 'linear module')}{layers}: {kinds}"
        f"{'; in full: ' + ', '.join(adapted.full) if adapted.full else ''}"
    )
    trained = _trained(plan)
    total = trained + plan.frozen.parameters
    yield (
        f"trained: {count(trained)} of {count(total)} parameters ({trained / total:.2%}); the other "
        f"{count(plan.frozen.parameters)} are kept once, in {plan.config.train.precision}, without gradient and "
        "optimizer state"
    )


def _trained(plan: Plan) -> int:
    return plan.decaying.parameters + plan.not_decaying.parameters


def _kernel_words(choice: Choice) -> str:
    forward, backward = choice.forward.name, choice.backward.name
    return f"{forward} forward and backward" if forward == backward else f"{forward} forward, {backward} backward"


def _data_words(plan: Plan) -> Iterator[str]:
    config, data = plan.config, plan.data
    packing = config.data.packing
    by = algorithm(config.data) if data is None or data.algorithm is None else data.algorithm
    if reads_packed(config.data):
        train = config.data.train
        how = f"packed file {(packing and packing.file) or (train if isinstance(train, str) else train and train[0])}"
    elif by == "none":
        how = "one document per row, the rest padding"
    else:
        by_format = data is None and packing is not None and packing.algorithm is None and config.data.format == "auto"
        how = f"packed by {by}{' (text: split)' if by_format else ''}"
    longest = config.data.sequence_length or (data.max_length if data else plan.pack_size)
    yield f"rows: {plan.pack_size:,} tokens, {how}; documents up to {longest:,} tokens"
    if data is not None:
        yield (
            f"data: {data.num_documents:,} documents, {data.num_tokens:,} tokens in {data.num_rows:,} rows "
            f"(n {data.packing_factor:.2f} documents per row, {data.num_tokens / (data.num_rows * plan.pack_size):.1%} "
            f"real tokens); longest document {data.max_length:,} tokens"
        )
        if data.mixture:
            yield f"mixture: {'; '.join(data.mixture)} in an epoch of {data.num_documents:,} documents"
    if config.data.streaming:
        yield (
            f"streaming: {config.data.shuffle_buffer:,} documents are shuffled and packed together; their order "
            "depends on the number of data ranks, and a run resumes on as many only"
        )


def _step_words(plan: Plan) -> Iterator[str]:
    train, data = plan.config.train, plan.data
    if plan.rows_per_step is None:
        yield (
            f"step: {train.global_batch_documents:,} documents; rows follow once the data is packed "
            "(`freight pack` shows them)"
        )
    else:
        if train.global_batch_documents is not None and data is not None:
            yield batch_size_sentence(
                train.global_batch_documents,
                data.packing_factor,
                data.num_rows,
                drop_last=plan.config.data.drop_last,
            )
        ranks = "" if plan.data_ranks == 1 else f" x {plan.data_ranks} data ranks"
        filler = f", {plan.filler_rows} of them filler without labels" if plan.filler_rows else ""
        slots = plan.rows_per_step + plan.filler_rows
        yield (
            f"step: {_many(plan.rows_per_step, 'row')} x {plan.pack_size:,} tokens = {plan.tokens_per_step:,} tokens; "
            f"{_many(plan.microbatches_per_step, 'microbatch')} x {_many(plan.rows_per_microbatch, 'row')}{ranks} = "
            f"{_many(slots, 'row')}{filler}; a microbatch is {plan.micro_batch_tokens:,} tokens"
        )
    yield f"run: {_run_length(plan)}"


def _run_length(plan: Plan) -> str:
    train = plan.config.train
    if plan.total_steps is None:
        return f"{train.epochs:g} epochs; the number of steps follows once the data is packed"
    words = f"{plan.total_steps:,} steps"
    if train.epochs is not None:
        words = f"{train.epochs:g} epochs x {plan.steps_per_epoch:,} steps per epoch = {words}"
    elif plan.data is not None and plan.rows_per_step:
        words += f" = {plan.total_steps * plan.rows_per_step / plan.data.num_rows:.2f} epochs"
    if plan.tokens_per_step is not None:
        words += f", at most {plan.total_steps * plan.tokens_per_step:,} tokens"
    return words


def _train_words(plan: Plan) -> Iterator[str]:
    train = plan.config.train
    optimizer = train.optimizer
    yield (
        f"optimizer: {optimizer.name}, lr {optimizer.lr:.2e}, {_schedule_words(plan)}; gradient norm "
        f"{'unclipped' if train.grad_clip is None else f'clipped to {train.grad_clip:g}'}"
    )
    yield (
        f"weight decay {optimizer.weight_decay:g} on {plan.decaying.tensors:,} weights of two or more dims "
        f"({count(plan.decaying.parameters)}); none on {plan.not_decaying.tensors:,} norms and biases "
        f"({count(plan.not_decaying.parameters)})"
    )
    yield {
        "bf16": "precision: bf16 compute; float32 master weights, optimizer state, softmax, loss and gradient sums",
        "fp32": "precision: float32 throughout",
    }[train.precision]
    yield f"changes the results beyond rounding: {', '.join(_recipe(plan)) or 'nothing'}"


def _schedule_words(plan: Plan) -> str:
    schedule = plan.config.train.schedule
    words = schedule.name
    if schedule.warmup_steps:
        words += f", {schedule.warmup_steps:,} warm-up steps"
    elif schedule.warmup_ratio:
        words += f", warm-up over {schedule.warmup_ratio:.1%} of the steps"
    if schedule.name != "constant":
        words += f", down to {schedule.min_lr_ratio:g} of it"
    return words


def _recipe(plan: Plan) -> Iterator[str]:
    """Settings of the recipe that alter what is learned, where they are on."""
    config, arch = plan.config, plan.arch
    if config.adapter is not None and config.adapter.dropout:
        yield f"adapter dropout {config.adapter.dropout:g}"
    if arch.attention_dropout:
        yield f"attention dropout {arch.attention_dropout:g}"
    if config.train.label_smoothing:
        yield f"label smoothing {config.train.label_smoothing:g}"
    if config.train.z_loss_coeff:
        yield f"z-loss {config.train.z_loss_coeff:g}"
    cut: Mapping[str | None, str] = {
        "drop": "longer documents are dropped",
        "cut_right": "longer documents lose their end",
        "cut_left": "longer documents lose their beginning",
        "drop_oldest_turns": "longer chats lose their oldest turns",
    }
    if config.data.truncation in cut:
        yield cut[config.data.truncation]
    if config.data.on_bad_record == "skip":
        yield "bad records are skipped"


def _many(number: int | None, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def count(number: int) -> str:
    """`134.5M`."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return str(number)
