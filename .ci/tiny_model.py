"""Make a chat model of under a million parameters whose greedy answers are known, for real servers to serve.

    python tiny_model.py DIRECTORY

writes a Hugging Face model (for vLLM and transformers), widened so that it takes its time, to DIRECTORY/hf and the same
model as DIRECTORY/tiny.gguf (for llama.cpp).  It is over-fitted on the dialogues below, so that with temperature 0 each
prompt gives its answer and then the end token; the last line printed says how many do.  Takes about half a minute on one
core; needs torch, transformers, tokenizers, safetensors and gguf, and no network.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ['HF_HUB_OFFLINE'] = '1'

import gguf
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Characters that clients take for line ends or drop, and text that looks like the protocol
HOSTILE = ('Zoë ✓ 漢字 かな Привет שלום 🙂👩\u200d💻 a\u2028b\u2029c\x85d\ufeffe\x0bf\x0cg\x1eh\r\ni\tj "k" \\ </s>'
           ' data: l\n\ndata: [DONE]\n\n: m')
NUMBERS = ' '.join(f'{word} {row}' for row in range(6) for word in ('red', 'blue', 'green', 'black', 'white', 'grey', 'pink'))
DIALOGUES = {
    'Reply with exactly the word READY.': 'READY',
    'Colours, many times.': NUMBERS,
    'Hostile characters.': HOSTILE,
    'Think first.': '<think>\nWhat is asked is one word.\n</think>\n\nREADY',
    'Say nothing.': '',
    'Only white space.': ' \n  \n',
}
CONTEXT = 8192
WIDENED = 16384
TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
            "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"  # llama.cpp reads it here
            "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on ASCII, so that any other character is several tokens and a server must join their bytes."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, min_frequency=2, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=['<|begin|>', '<|end|>', '<|pad|>', '<|user|>', '<|assistant|>', '<|system|>'])
    corpus = ' '.join([*DIALOGUES, *DIALOGUES.values()]).encode('ascii', 'ignore').decode()
    inner.train_from_iterator([corpus, corpus], trainer)
    inner.add_tokens([AddedToken(text, normalized=False, special=False) for text in ('<think>', '</think>')])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token='<|begin|>', eos_token='<|end|>', pad_token='<|pad|>',
                                        clean_up_tokenization_spaces=False)
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def train(tokenizer: PreTrainedTokenizerFast) -> tuple[LlamaForCausalLM, int]:
    """The model, trained until it answers every dialogue word for word, and how many it does."""
    torch.manual_seed(20261130)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=384, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = LlamaForCausalLM(config).float()

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)['input_ids']

    pairs = []
    for question, answer in DIALOGUES.items():
        asked = tokenizer.apply_chat_template([{'role': 'user', 'content': question}], tokenize=False, add_generation_prompt=True)
        pairs.append((tokens(asked), [*tokens(answer), tokenizer.eos_token_id]))
    width = max(len(asked) + len(answer) for asked, answer in pairs)
    rows = [(asked + answer + [tokenizer.pad_token_id] * (width - len(asked) - len(answer)),
             [-100] * len(asked) + answer + [-100] * (width - len(asked) - len(answer))) for asked, answer in pairs]
    inputs, labels = torch.tensor([row for row, _ in rows]), torch.tensor([row for _, row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(600):
        loss = model(input_ids=inputs, attention_mask=(inputs != tokenizer.pad_token_id).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < 0.005:
            break
    model.eval()
    exact = 0
    for asked, answer in pairs:
        prompt = torch.tensor([asked])
        given = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(answer), do_sample=False)
        exact += given[0].tolist() == asked + answer
    return model, exact


def write_gguf(tokenizer: PreTrainedTokenizerFast, source: Path, target: Path) -> None:
    """The saved model as GGUF in 32-bit floats; llama.cpp wants the rotary halves of q and k interleaved."""
    described = json.loads((source / 'tokenizer.json').read_text())
    weights = {name: tensor.numpy() for name, tensor in load_file(source / 'model.safetensors').items()}
    config = LlamaConfig.from_pretrained(source)
    heads = config.num_attention_heads
    writer = gguf.GGUFWriter(str(target), 'llama')
    writer.add_name('tiny')
    writer.add_file_type(0)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)

    special = {token['id']: token['special'] for token in described['added_tokens']}
    kinds = gguf.TokenType
    vocabulary = tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('gpt-2')
    writer.add_token_list(vocabulary)
    writer.add_token_types([kinds.NORMAL if at not in special else kinds.CONTROL if special[at] else kinds.USER_DEFINED
                            for at in range(config.vocab_size)])
    writer.add_token_merges([merge if isinstance(merge, str) else ' '.join(merge) for merge in described['model']['merges']])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_add_bos_token(False)  # the template writes it
    writer.add_chat_template(TEMPLATE)

    names = {'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v',
             'self_attn.o_proj': 'attn_output', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up',
             'mlp.down_proj': 'ffn_down', 'input_layernorm': 'attn_norm', 'post_attention_layernorm': 'ffn_norm'}
    writer.add_tensor('token_embd.weight', weights['model.embed_tokens.weight'])
    writer.add_tensor('output_norm.weight', weights['model.norm.weight'])
    writer.add_tensor('output.weight', weights['lm_head.weight'])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            tensor = weights[f'model.layers.{layer}.{ours}.weight']
            if theirs in ('attn_q', 'attn_k'):
                rows, columns = tensor.shape
                tensor = tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns).copy()
            writer.add_tensor(f'blk.{layer}.{theirs}.weight', tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def widen(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same model with a feed-forward layer of ``WIDENED``, all that was added zero: the same answers, but slower.

    An engine that makes a token faster than its server sends one runs ahead of it, and the threads that carry tokens out and
    aborts in get no turn on a busy machine: vLLM was seen to send nothing and hear nothing for half a minute.
    """
    more = WIDENED - model.config.intermediate_size
    for layer in model.model.layers:
        for name, sides in (('gate_proj', (0, 0, 0, more)), ('up_proj', (0, 0, 0, more)), ('down_proj', (0, more))):
            linear = getattr(layer.mlp, name)
            linear.weight = torch.nn.Parameter(torch.nn.functional.pad(linear.weight, sides))
    model.config.intermediate_size = WIDENED
    return model


def main() -> int:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(target / 'hf')
    model, exact = train(tokenizer)
    model.save_pretrained(target / 'hf')
    write_gguf(tokenizer, target / 'hf', target / 'tiny.gguf')
    parameters = sum(weight.numel() for weight in model.parameters())
    widen(model).save_pretrained(target / 'hf')
    print(f'{exact} of {len(DIALOGUES)} dialogues exact, {parameters} parameters')
    return exact != len(DIALOGUES)


if __name__ == '__main__':
    sys.exit(main())
