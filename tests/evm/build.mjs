// Compile Token.sol and Wallet.sol to Token.json and Wallet.json (ABI and runtime bytecode).
//   node build.mjs          write them
//   node build.mjs --check  compare with what is committed; exit 1 on any difference
import { readFileSync, writeFileSync } from "node:fs";
import solc from "solc";

const here = (name) => new URL(name, import.meta.url);
const contracts = ["Token", "Wallet"];

const input = {
  language: "Solidity",
  sources: Object.fromEntries(
    contracts.map((name) => [`${name}.sol`, { content: readFileSync(here(`${name}.sol`), "utf8") }]),
  ),
  settings: {
    evmVersion: "shanghai",
    optimizer: { enabled: true, runs: 200 },
    // No metadata trailer: the bytecode then depends on the code alone, not on comments or file names.
    metadata: { appendCBOR: false, bytecodeHash: "none" },
    outputSelection: { "*": { "*": ["abi", "evm.deployedBytecode.object"] } },
  },
};

const output = JSON.parse(solc.compile(JSON.stringify(input)));
for (const problem of output.errors ?? []) console.error(problem.formattedMessage);
if (!output.contracts) process.exit(1);

for (const name of contracts) {
  const { abi, evm } = output.contracts[`${name}.sol`][name];
  const artifact = {
    contract: name,
    compiler: solc.version(),
    abi,
    runtime: `0x${evm.deployedBytecode.object}`,
  };
  const text = `${JSON.stringify(artifact, null, 1)}\n`;
  if (!process.argv.includes("--check")) {
    writeFileSync(here(`${name}.json`), text);
  } else if (readFileSync(here(`${name}.json`), "utf8") !== text) {
    console.error(`${name}.json is not what ${name}.sol compiles to: run make contracts`);
    process.exitCode = 1;
  }
}
