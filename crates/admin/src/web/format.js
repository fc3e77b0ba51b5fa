// Figures with units, formatted like crates/measure/src/units.rs.

const GROUPED = new Intl.NumberFormat("en");

export const NONE = "–";

// Untrusted text: usernames, realms, names of nodes and certificates. Different texts never look the same. The rule is explained in
// wire::escape.
const ODD = /^ | $|(?<= ) |(?! )[\p{C}\p{Z}\p{Grapheme_Extend}\p{Default_Ignorable_Code_Point}\u2026\u2800\\"]/gu;
const SHORT = { "\0": "\\0", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\\": "\\\\", "\"": "\\\"" };
export const named = (text) => text.replace(ODD, (odd) => SHORT[odd] ?? `\\u{${odd.codePointAt(0).toString(16)}}`);
// A server without authentication has no users.
export const user = (text) => (text === "" ? "(no user)" : named(text));

// Three digits and a prefix: 1.23 k.
function prefixed(value, unit) {
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  let at = 0;
  while (value >= 999.5 && at + 1 < prefixes.length) {
    value /= 1000;
    at += 1;
  }
  const digits = at === 0 && Number.isInteger(value) ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${value.toFixed(digits)} ${prefixes[at]}${unit}`.trim();
}

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

export const count = (value) => (known(value) ? GROUPED.format(value) : NONE);
export const many = (value, what) => `${count(value)} ${what}${value === 1 ? "" : "s"}`;
export const perSecond = (value) => (known(value) ? `${prefixed(value, "")}/s` : NONE);
export const bits = (bitsPerSecond) => (known(bitsPerSecond) ? prefixed(bitsPerSecond, "bit/s") : NONE);
export const bytes = (value) => (known(value) ? prefixed(value, "B") : NONE);
export const percent = (share) => (known(share) ? `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %` : NONE);
export const decimal = (value) => (known(value) ? value.toFixed(value < 9.95 ? 1 : 0) : NONE);

export function micros(us) {
  if (!known(us)) return NONE;
  if (us < 1000) return `${Math.round(us)} µs`;
  return us < 1e6 ? `${(us / 1000).toFixed(us < 9950 ? 1 : 0)} ms` : `${(us / 1e6).toFixed(1)} s`;
}

const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const YEAR = 365 * DAY;

// At most two units.
export function span(seconds) {
  if (!known(seconds)) return NONE;
  const whole = Math.floor(Math.abs(seconds));
  const sign = seconds < 0 ? "-" : "";
  const of = (length) => Math.floor(whole / length);
  const two = (large, rest, length, unit) => (rest < length ? `${sign}${large}` : `${sign}${large} ${Math.floor(rest / length)} ${unit}`);
  const days = `${of(DAY)} day${of(DAY) === 1 ? "" : "s"}`;
  if (whole < MINUTE) return `${sign}${whole} s`;
  if (whole < HOUR) return two(`${of(MINUTE)} min`, whole % MINUTE, 1, "s");
  if (whole < DAY) return two(`${of(HOUR)} h`, whole % HOUR, MINUTE, "min");
  if (whole < 10 * DAY) return two(days, whole % DAY, HOUR, "h");
  return `${sign}${whole < 2 * YEAR ? days : `${of(YEAR)} years`}`;
}

export const clock = (date) => date.toTimeString().slice(0, 8);

export function dateTime(text) {
  const date = new Date(text);
  if (Number.isNaN(date.getTime())) return NONE;
  const pad = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${clock(date)}`;
}

export const both = (one, other) => [one, other].filter((text) => text !== "").join("; ");

// Place of a trouble of media, for example `client uplink`.
export const trouble = (of) => (of ? `${of.leg} ${of.direction ?? "round trip"}` : "");

// Country and autonomous system, if known.
export const network = (of) => (of ? [of.country, of.asn === null ? null : `AS${of.asn}`].filter((text) => text !== null).join(" ") : "");
