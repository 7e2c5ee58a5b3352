// Makes and reuses elements. Nothing here sets inline styles or markup from strings: the page's policy forbids
// the one, and names that come from clients rule out the other.

const SVG = "http://www.w3.org/2000/svg";

/** The element of the page with an id; it is there, or the page is broken. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found;
}

/** An element with attributes and children; functions among the attributes listen (`onclick`). */
export function element(name, attributes = {}, ...children) {
  return dressed(document.createElement(name), attributes, children);
}

/** The same of SVG. */
export function shape(name, attributes = {}, ...children) {
  return dressed(document.createElementNS(SVG, name), attributes, children);
}

function dressed(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Set a text only where it changed: what is the same need not be read out or laid out again. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/**
 * Children for items, in their order. An item that was there before keeps its element, and with it the focus.
 *
 * @param {Element} parent
 * @param {Array} items
 * @param {(item) => string} keyOf names an item
 * @param {(item) => Element} make
 * @param {(child: Element, item) => void} update is called for new ones, too
 */
export function keyed(parent, items, keyOf, make, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const focused = document.activeElement;
  const children = items.map((item) => {
    const key = keyOf(item);
    let child = before.get(key);
    before.delete(key);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = key;
    }
    update(child, item);
    return child;
  });
  for (const gone of before.values()) gone.remove();
  let place = parent.firstElementChild;
  for (const child of children) {
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  // An element that is moved loses the focus.
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}
