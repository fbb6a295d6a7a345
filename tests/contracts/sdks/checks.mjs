// Named checks of a program that uses an SDK: each prints one line of JSON with its result.
export const { BASE_URL, CLOSED_URL } = process.env;
export const ADD = {
  name: "add",
  description: "Add two numbers.",
  parameters: {
    type: "object",
    properties: { a: { type: "integer" }, b: { type: "integer" } },
    required: ["a", "b"],
  },
};
export const TOO_LONG = "word ".repeat(9000);
export const user = (content) => [{ role: "user", content }];

/** Run every check, also after one that fails. */
export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    let error = null;
    try {
      await check();
    } catch (failure) {
      error = String(failure?.stack ?? failure);
    }
    console.log(JSON.stringify({ check: name, error }));
  }
}
