"""What the scripts have in common that are written for TRL's trainers without a command."""

from __future__ import annotations

ROWS = '''def rows(script):
    """A folder that `save_to_disk` wrote, or what `load_dataset` knows."""
    folder = Path(script.dataset_name)
    if any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        found = load_from_disk(script.dataset_name)
        return found[script.dataset_train_split] if isinstance(found, DatasetDict) else found
    return load_dataset(script.dataset_name, name=script.dataset_config)[script.dataset_train_split]
'''
"""Reads the data that the YAML names."""

LOADING = """    quantised = trl.get_quantization_config(model)
    # Releases have it in the one or in the other.
    trusts = any(getattr(one, "trust_remote_code", False) for one in (config, model))
    loading = {
        "revision": model.model_revision, "trust_remote_code": trusts, "dtype": model.dtype,
        "attn_implementation": model.attn_implementation, "quantization_config": quantised,
        "device_map": trl.get_kbit_device_map() if quantised else None,
    }
    loading = {name: value for name, value in loading.items() if value is not None}
"""
"""What the policy is loaded with: `loading`, and whether its code is trusted."""
