#!/usr/bin/env bash
# The main job on the synthetic models: demo.sh BIN OUT, where BIN holds the sam3d-* commands.
set -euo pipefail
bin=$1
out=$2
fixtures=${FIXTURES:-tests/fixtures}
fixture=$fixtures/tiny-body-a

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
echo "The same for a complete SAM 3D Objects in miniature, six checkpoints and their YAML files. In the"
echo "captures its mesh decoder has a smaller grid than the rest; here it has theirs, 64."
mkdir "$out/checkpoints"
cp "$fixtures"/tiny-objects-a/*.ckpt "$fixtures"/tiny-objects-a/*.yaml "$out/checkpoints/"
sed -i "s/^resolution: 16$/resolution: 64/" "$out/checkpoints/slat_decoder_mesh.yaml"
step "Six checkpoints become six files of one release" \
    sam3d-convert objects --checkpoint-dir "$out/checkpoints" --allow-unpinned --out "$out/objects"
step "Check what was written, from the manifest alone" sam3d-verify "$out/objects/manifest.json"
balls=$fixtures/two-balls
step "Run it: a photo, two masks and a pointmap become Gaussians, meshes and poses in one scene" \
    sam3d-run objects --models "$out/objects" --image "$balls/photo.png" --mask "$balls/mask.png" \
    --mask "$balls/mask-2.png" --pointmap "$balls/points.npy" \
    --steps-ss 8 --steps-slat 8 --out "$out/scene"
capture=$fixtures/tiny-objects-a
step "Run the pipeline once more from recorded inputs and noise" \
    sam3d-run objects --models "$out/objects" --component pipeline \
    --inputs "$capture/inputs-pipeline.safetensors" --taps "$out/pipeline.safetensors"
step "Compare it with what the original PyTorch code computed from them" \
    sam3d-parity --reference "$capture/expected-pipeline.safetensors" \
    --candidate "$out/pipeline.safetensors" --rules "$capture/rules-pipeline.json"

echo
echo "The demo is complete; its files are in $out/. $out/scene/preview.png shows what Objects made:"
echo "weights are random, so it is noise."
