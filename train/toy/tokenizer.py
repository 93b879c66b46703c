"""A byte-level BPE tokenizer with a chat format, trained on a corpus."""

from collections.abc import Iterable
from typing import Any

END, PAD, MASK = "<|im_end|>", "<|pad|>", "<|mask|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A `PreTrainedTokenizerFast`; every digit is a token, and any text can be encoded.

    The four special tokens are the last of the vocabulary: start and end of turn, pad, mask.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", END, PAD, MASK]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    short = vocab_size - len(special) - tokenizer.get_vocab_size()
    if short:
        raise ValueError(f"the corpus yields {short} tokens fewer than vocab_size {vocab_size}; lower it")
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, mask_token=MASK)
    fast.chat_template = CHAT_TEMPLATE
    return fast
