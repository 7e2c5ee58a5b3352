// Numbers as they are read: three digits, a unit, and the same width for the same kind of thing.

const LOCALE = "en-US";
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const NOT_KNOWN = "–";

const whole = new Intl.NumberFormat(LOCALE, { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat(LOCALE, { notation: "compact", maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

function threeDigits(value) {
  return value >= 100 || Number.isInteger(value) ? whole.format(value) : value.toPrecision(3);
}

/** 3.20 GiB */
export function bytes(value) {
  if (value === null || value === undefined) return NOT_KNOWN;
  let unit = 0;
  while (value >= 1023.5 && unit < BINARY.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? whole.format(value) : threeDigits(value)} ${BINARY[unit]}`;
}

/** 21.5 GB/s: bandwidth is told in powers of ten, as links and memory are sold. */
export function rate(value) {
  if (value === null || value === undefined) return NOT_KNOWN;
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? whole.format(value) : threeDigits(value)} ${units[unit]}`;
}

/** 40,960 */
export function count(value) {
  return value === null || value === undefined ? NOT_KNOWN : whole.format(value);
}

/** 1.34M: for what is glanced at; its title has the whole number. */
export function short(value) {
  if (value === null || value === undefined) return NOT_KNOWN;
  return value < 10_000 ? whole.format(Math.round(value)) : compact.format(value);
}

/** 92.4% */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return NOT_KNOWN;
  const value = share * 100;
  if (value > 0 && value < 0.1) return "<0.1%";
  return `${value >= 99.95 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1)}%`;
}

/** 340 ms, 4.2 s, 5 min, 3.1 h, 2.3 d */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NOT_KNOWN;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  for (const [size, unit] of [
    [86_400, "d"],
    [3600, "h"],
    [60, "min"],
  ]) {
    if (seconds >= size) {
      const value = seconds / size;
      return `${value < 10 ? value.toFixed(1) : whole.format(value)} ${unit}`;
    }
  }
  return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
}

/** 14:03:22, of seconds since 1970 */
export function time(seconds) {
  return clock.format(seconds * 1000);
}

/** 1 block, 2 blocks */
export function counted(value, noun, plural = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : plural}`;
}

/** What a tenant is called. */
export function tenantName(tenant) {
  return tenant === "" ? "no tenant" : tenant;
}

/** What tells two hashes apart at a glance. */
export function shortHash(hash) {
  return `${hash.slice(0, 8)}…${hash.slice(-4)}`;
}

/** Whose a space is, and which shard: acme · tp0/2 */
export function spaceName(space) {
  return space.shard === "" ? tenantName(space.tenant) : `${tenantName(space.tenant)} · ${space.shard}`;
}
