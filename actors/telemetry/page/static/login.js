// A token in the fragment is sent once by the form, and leaves the address.
"use strict";
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  history.replaceState(null, "", location.pathname + location.search);
  document.getElementById("token").value = given;
  document.getElementById("login").submit();
}
