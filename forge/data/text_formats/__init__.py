"""Readers of text: a module for each format of `core.text_formats.TEXT_FORMATS`, named like it, or one
that the table names.

Its function `documents` is called once for each input file, in the workers of `forge tokenize`, where a
tokenizer is trained on a sample, and where the text that a tokenizer loses is estimated:

    def documents(file: TextInput) -> Iterator[str]

It gives the documents of the file in their order, lazily: who asks may stop before the end. Documents of
white space only are left out by whoever asks, and none is divided between the splits. The text is valid
Unicode without surrogates. The same bytes and settings give the same documents, on every machine.

- *Bytes*: `file.open()` has them decompressed, and with progress and digest of what was read; a reader
  that lets a library open the file calls `file.digest()` and `file.consumed(num_bytes)`.
- *Text*: `file.utf8.decode(data, position)`, which holds tokenize.invalid_utf8; `position` tells where a
  byte is, for people. `decoding.check_length` refuses a document that memory might not hold.
- *Settings*: `file.settings` has the keys of `tokenize` or of the source.
- *Packing*: the module of a format with `special_tokens` also has a class `Packing` and a function
  `plain_text` (`data.packing`).
- *Errors*: DataError with file, position and what to do for whatever cannot be read. Nothing is left out
  silently. EOFError, zlib.error and OSError without a number, as decompressors raise them, are told as a
  corrupt file.
"""
