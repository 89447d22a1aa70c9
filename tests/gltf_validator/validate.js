// Prints what the Khronos glTF validator says of the .glb file on standard input, as JSON.

const { readFileSync } = require("node:fs");
const { validateBytes } = require("gltf-validator");

validateBytes(new Uint8Array(readFileSync(0)), { maxIssues: 100 })
    .then((report) => console.log(JSON.stringify(report)))
    .catch((error) => {
        console.error(error);
        process.exitCode = 1;
    });
