#!/usr/bin/env bash
# The main job on the synthetic model: demo.sh BIN OUT, where BIN holds the sam3d-* commands.
set -euo pipefail
bin=$1
out=$2
fixture=${FIXTURE:-tests/fixtures/tiny-body-a}

if [ -e "$out" ] && [ ! -e "$out/.sam3d-demo" ]; then
    echo "demo: $out exists and is not an earlier demo's output; move it away" >&2
    exit 2
fi
rm -rf "$out"
mkdir -p "$out"
touch "$out/.sam3d-demo"

say() {
    echo
    echo "# $1"
    echo "\$ $2"
}

step() {
    say "$1" "${*:2}"
    "$bin/$2" "${@:3}"
}

echo "A complete SAM 3D Body in miniature, with random weights: a 2.9 MB torch checkpoint and a"
echo "4.7 MB TorchScript MHR asset become body.gguf, mhr.gguf and manifest.json in $out/."
echo "Neither file is a pinned release, so --allow-unpinned is needed and recorded."

step "Read both in the sandbox, check them against the contracts, write GGUF" \
    sam3d-convert body --checkpoint "$fixture/model.ckpt" --mhr "$fixture/mhr_model.stub.pt" \
    --allow-unpinned --out "$out/body.gguf"
step "Check what was written, from the manifest alone" sam3d-verify "$out/manifest.json"
say "What the Body file holds, in short" "sam3d-inspect $out/body.gguf | tail -n 16"
"$bin/sam3d-inspect" "$out/body.gguf" | tail -n 16
step "What the MHR file holds" sam3d-inspect "$out/mhr.gguf"

photo=(--image "$fixture/input.png" --bbox 52,8.5,141.25,139 --intrinsics 231.5,226,97.25,78.5)
step "Run it: a photo and a box become a posed mesh, hands refined, every intermediate kept" \
    sam3d-run body --model "$out/body.gguf" --mhr "$out/mhr.gguf" "${photo[@]}" \
    --taps "$out/taps.safetensors" --out "$out/result"
step "Compare every intermediate with what the original PyTorch code computed" \
    sam3d-parity --reference "$fixture/expected-full.safetensors" \
    --candidate "$out/taps.safetensors" --rules "$fixture/rules.json" --limits free-running \
    --report "$out/parity.json" --html "$out/parity.html"

echo
echo "The demo is complete; its files are in $out/."
