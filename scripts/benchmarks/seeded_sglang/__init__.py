"""Named by SGLANG_EXTERNAL_MODEL_PACKAGE, so that each process of SGLang's imports `draws`."""
