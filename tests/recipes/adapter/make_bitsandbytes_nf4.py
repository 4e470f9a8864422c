"""Write bitsandbytes_nf4.json: NF4 of one weight. Needs `pip install --no-deps bitsandbytes` beside it (0.50.2)."""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import bitsandbytes.functional as bnb
from nf4_example import nf4_example


def main() -> None:
    weight = nf4_example()  # [64, 128]
    codes, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=False)
    whole = bnb.dequantize_4bit(codes, state)
    doubled = bnb.dequantize_4bit(*bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True))
    found = {
        "values": state.code.tolist(),
        "codes": codes.numpy().tobytes().hex(),
        "scales": state.absmax.tolist(),
        "first_row": whole[0].tolist(),
        "sha256_of_dequantized": hashlib.sha256(whole.numpy().tobytes()).hexdigest(),
        "error": float((whole - weight).norm() / weight.norm()),
        "error_with_double_quantization": float((doubled - weight).norm() / weight.norm()),
    }
    (Path(__file__).parent / "bitsandbytes_nf4.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
