// Drives the unmodified SDK for Node: the account, sudo, ports, metadata of files, auto-resume. Prints one JSON object.
import http from 'node:http'
import { Sandbox } from 'e2b'

const found = {}
const sandbox = await Sandbox.create({ timeoutMs: 120_000 })
found.who = (await sandbox.commands.run('whoami; pwd; sudo id -u; echo $E2B_SANDBOX_ID')).stdout.trim().split('\n')
found.same = found.who.pop() === sandbox.sandboxId

// The host name of a port, which not every resolver knows: the request goes to this machine and names it.
await sandbox.commands.run('python3 -m http.server 8000 --directory /tmp', { background: true })
await sandbox.files.write('/tmp/page.txt', 'hello', { metadata: { Author: 'me' } })
const [host, port] = sandbox.getHost(8000).split(':')
const get = (path) => new Promise((resolve, reject) => {
  const request = http.get({ host: '127.0.0.1', port, path, headers: { Host: `${host}:${port}` } }, (response) => {
    let text = ''
    response.on('data', (data) => { text += data })
    response.on('end', () => resolve([response.statusCode, text]))
  })
  request.on('error', reject)
})
let answer
do { answer = await get('/page.txt') } while (answer[0] === 502)
found.page = answer
found.domain = host.endsWith('.localhost')
found.metadata = (await sandbox.files.getInfo('/tmp/page.txt')).metadata

await sandbox.kill()
const paused = await Sandbox.create({ timeoutMs: 120_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
await paused.pause()
found.resumed = (await paused.commands.run('echo awake')).stdout.trim()
await paused.kill()
console.log(JSON.stringify(found))
