// A colour for each tenant, the same one everywhere in the page and for as long as it is open.

/** Tenants with a colour of their own; the style sheet has as many (`tenant-0` and so on). */
const COLOURS = 7;
const places = new Map();

/** The class of a tenant's colour. Those that come after the first few share the last one. */
export function tenantClass(tenant) {
  if (!places.has(tenant)) places.set(tenant, Math.min(places.size, COLOURS));
  return `tenant-${places.get(tenant)}`;
}

/** All tenants that were seen, in the order of their colours. */
export function tenantsSeen() {
  return [...places.keys()];
}
