"""Tokens in: corpora, tokenizer, token files, and the order in which training reads them.

This room imports nothing else of the project. Its files, in the order in which
text passes through them:

- `documents`: user files (.txt, .jsonl, .jsonl.gz) to `Document`s
- `sources`: the built-in domains, read from installed packages
- `deduplicate`: near-duplicates, removed before anything is held out
- `split`: which documents (or which tail of a document) are held out
- `tokenizer`: byte-level BPE, trained by `tokenizers`, run by `tiktoken`
- `token_file`: token ids on disk, memory-mapped, with checked sizes
- `corpus`: a folder of token files that knows what it was made from
- `build`, `prepare`: all of the above as one function and one command
- `order`: sample index -> (domain, window), a pure function
- `batches`: step -> tensors, and the windows of the held-out split

Nothing is re-exported here, so that building a corpus does not import torch.
Array names end in the project's shape suffixes: B batch, S sequence,
V vocabulary; here also N tokens, W words, and M documents.
"""
