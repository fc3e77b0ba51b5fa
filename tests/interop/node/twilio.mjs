// Requests a credential from URL with Twilio's library, and prints it as JSON.
//
// usage: twilio.mjs URL KEY, where the library is installed

import { createRequire } from "node:module";

const [url, key] = process.argv.slice(2);
// Resolved from the working directory: ./test installs nothing next to this file.
const twilio = createRequire(`${process.cwd()}/`)("twilio");

const client = (twilio.default ?? twilio)(`AC${"0".repeat(32)}`, key);
client.api.baseUrl = url;
console.log(JSON.stringify(await client.tokens.create({ ttl: 600 })));
