"""Build a real but tiny language model: a byte bigram as a llama-architecture GGUF of 0.7 MB.

It is counted, not trained, from the help topics that come with Python, so nothing is downloaded.
Each byte predicts the next one: the embedding is one-hot, the only layer is all zeros and passes
it through, and the output matrix holds the logarithms of the counts. llama.cpp serves it like any
other model, some thousand tokens a second. Needs `gguf` and `numpy`, imported only when used.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

WIDTH: Final = 288  # at least the vocabulary, and divisible by the heads
HEADS: Final = 9
HIDDEN: Final = 32
CONTEXT: Final = 4096
START: Final = 256  # <|im_start|>
END: Final = 257  # <|im_end|>
SIZE: Final = 258
NEVER: Final = 1e-9
SELDOM: Final = 1e-3
# How often a line's end is the end of the answer: answers of some dozens of tokens.
ENDING: Final = 0.4
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n'"
    " + (message['content'] or '') + '<|im_end|>\\n' }}{% endfor %}"
    # A second start mark: only after it does the model begin with a capital letter.
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<|im_start|>' }}{% endif %}"
)


def build(path: Path) -> None:
    """Write the model to this path."""
    import gguf
    import numpy

    writer = gguf.GGUFWriter(str(path), "llama")
    _describe(writer)
    embedding = numpy.zeros((SIZE, WIDTH), numpy.float16)
    embedding[numpy.arange(SIZE), numpy.arange(SIZE)] = 1.0
    # Normalizing a one-hot row multiplies it by the root of the width; the output takes it back.
    output = numpy.zeros((SIZE, WIDTH), numpy.float16)
    output[:, :SIZE] = _log_probabilities(numpy).T / numpy.sqrt(WIDTH)
    ones = numpy.ones(WIDTH, numpy.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("output.weight", output)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", ones)
    for name, shape in _layer_shapes().items():
        writer.add_tensor(f"blk.0.{name}.weight", numpy.zeros(shape, numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kiln_site.demo.tiny_model", description="Build the tiny bigram model."
    )
    parser.add_argument("path", type=Path, metavar="OUT.gguf")
    path: Path = parser.parse_args(arguments).path
    try:
        build(path)
    except ImportError as missing:
        sys.stderr.write(
            f"{missing.name} is not installed:"
            " pip install --no-deps -r requirements-realserver.txt\n"
        )
        return 1
    sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")
    return 0


def _describe(writer: Any) -> None:
    writer.add_name("kiln-bigram")
    writer.add_license("PSF-2.0")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_byte_names(), "<|im_start|>", "<|im_end|>"])
    writer.add_token_types([1] * 256 + [3, 3])
    writer.add_token_merges(["z z"])  # One that never applies: the loader wants a list.
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _layer_shapes() -> dict[str, tuple[int, int]]:
    return {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (WIDTH // HEADS, WIDTH),
        "attn_v": (WIDTH // HEADS, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (HIDDEN, WIDTH),
        "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }


def _byte_names() -> list[str]:
    """GPT-2's printable names for the 256 byte values."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [value for value in range(256) if value not in printable]
    return [
        chr(value) if value in printable else chr(256 + others.index(value)) for value in range(256)
    ]


def _log_probabilities(numpy: Any) -> Any:
    """Rows: the byte before; columns: the byte after."""
    text = numpy.frombuffer(_text(), dtype=numpy.uint8)
    before, after = text[:-1], text[1:]
    counts = numpy.full((SIZE, SIZE), SELDOM)
    numpy.add.at(counts, (before, after), 1.0)
    newline = ord("\n")
    counts[newline] *= (1 - ENDING) / counts[newline].sum()
    counts[newline, END] = ENDING
    counts[:, START] = NEVER
    counts[START] = counts[END] = NEVER
    counts[END, newline] = 1.0
    # An answer begins as a line of the text that begins with a capital letter.
    capitals = (before == newline) & (after >= ord("A")) & (after <= ord("Z"))
    numpy.add.at(counts[START], after[capitals], 1.0)
    # Bytes beyond ASCII follow each other only as they did in the text: UTF-8 stays whole.
    for rows, columns in ((slice(128, 256), slice(0, 256)), (slice(0, 256), slice(128, 256))):
        block = counts[rows, columns]
        counts[rows, columns] = numpy.where(block > 0.5, block, NEVER)
    return numpy.log(counts / counts.sum(axis=1, keepdims=True))


def _text() -> bytes:
    from pydoc_data.topics import topics

    return re.sub(" +", " ", "\n".join(topics.values())).encode()


if __name__ == "__main__":
    sys.exit(main())
