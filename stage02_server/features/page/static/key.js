// Part 2 of 9: the API key, tried as soon as it is there, and texts for the clipboard.

const KEY = "api-key";
let triedKey = null;
let isOpen = false; // does this server answer without a key?

/** This tab's storage, or nothing where the browser keeps none. */
function kept() {
  try {
    return window.sessionStorage;
  } catch {
    return null;
  }
}

/** Ask with the key in the field. One that is accepted outlives a reload of the tab, no other does. */
async function tryKey() {
  const key = byId("api-key").value;
  if (key === triedKey) return;
  triedKey = key;
  kept()?.removeItem(KEY);
  tellOfKey(key ? "trying the key" : "");
  listenAnew();
  const isAccepted = await loadModels();
  if (byId("api-key").value !== key) return; // another one is being tried
  if (!key) isOpen = isAccepted;
  else if (isAccepted) kept()?.setItem(KEY, key);
  tellOfKey(!key ? "" : !isAccepted ? "refused: not a key of this server" : isOpen ? "not needed: this server asks for none" : "accepted, and kept until this tab is closed", key && !isAccepted);
}

function tellOfKey(text, isWrong = false) {
  byId("key-status").textContent = text;
  byId("key-status").className = isWrong ? "warning" : "caption";
}

/** Put an element's text into the clipboard; returns what to tell. Browsers offer their clipboard to https and to this machine only: over plain
 * HTTP from another host the text is selected, and copied the old way. */
async function copyText(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return "copied";
  } catch {
    getSelection().selectAllChildren(element);
    if (document.execCommand("copy")) return "copied";
  }
  return "this browser lets no page copy over plain HTTP; the text is selected: press Ctrl + C";
}

byId("api-key").addEventListener("change", tryKey);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  tryKey();
});
byId("api-key").value = kept()?.getItem(KEY) ?? "";
