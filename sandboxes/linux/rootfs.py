# ruff: noqa: PTH101, PTH102, PTH103, PTH106, PTH112, PTH113, PTH114, PTH115, PTH120, PTH123, PTH211
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""File trees of the launcher and of each sandbox, built with direct mounts.

Invariants:
- The launcher runs in its own mount namespace, whose root is a private tmpfs. The host's /root, /home, /var and /etc
  are not in it, so no later mistake can reach them, and everything vanishes with the last process.
- Each sandbox has one tmpfs of limited size. The launcher sees it as `/layers/<id>`; the sandbox sees it as `/`, or as
  the upper layer of `/` above an image's read-only layers. Nothing else is writable.
- Idmapped mounts show image layers with the sandbox's ids; nothing is copied or changed.
- Layers are mounted by real root before the sandbox's user namespace exists: the sandbox owns none of its mounts and
  cannot change them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from headrace.sandboxes.linux import syscalls
from headrace.sandboxes.linux.hidden_host import Cover, cover, prepare_covers, show_folder

LAYERS: Final = "/layers"
IMAGES: Final = "/images"
DEVICES: Final = "/devices"
"""Folder in which loop devices are made temporarily."""
MAX_LAYERS: Final = 128
"""Maximum number of layers of one image; overlayfs supports up to 500 if their names fit in a page."""
_TERMINALS: Final = 32
"""Maximum number of terminals of one sandbox; the host has about 3,000 in total (kernel.pty.max)."""
_LOWER: Final = "/lower"
_PROGRAMS: Final = "/programs"
_USR_WITH_PROGRAMS: Final = "/usr-with-programs"
_FROZEN: Final = "/frozen"

_SYSTEM_FOLDERS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES: Final = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_DEVICE_LINKS: Final = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
    "shm": "/run/shm",
}
_FOLDERS: Final = (
    ("etc", 0o755),
    ("etc/alternatives", 0o755),
    ("etc/pam.d", 0o755),
    ("root", 0o700),
    ("home", 0o755),
    ("workspace", 0o777),
    ("tmp", 0o1777),
    ("var", 0o755),
    ("var/tmp", 0o1777),
    ("run", 0o755),
    ("run/shm", 0o1777),
    ("opt", 0o755),
    ("mnt", 0o755),
    ("srv", 0o755),
    ("usr", 0o755),
    ("dev", 0o755),
    ("proc", 0o555),
)
_NEEDED_FOLDERS: Final = (("etc", 0o755), ("dev", 0o755), ("proc", 0o555), ("tmp", 0o1777), ("workspace", 0o777))
"""/dev/shm points to /run/shm, which an image creates itself if it needs it."""
AGENT_ID: Final = 1000
_ETC: Final = {
    "passwd": f"root:x:0:0:root:/root:/bin/bash\nagent:x:{AGENT_ID}:{AGENT_ID}:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": f"root:x:0:\ntty:x:5:\nagent:x:{AGENT_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
    "resolv.conf": "",
    "pam.d/su": "auth sufficient pam_rootok.so\naccount required pam_permit.so\nsession required pam_permit.so\n",
    "pam.d/other": "auth required pam_deny.so\naccount required pam_deny.so\nsession required pam_deny.so\n",
}
_FORBIDDEN_TARGETS: Final = ("proc", "dev", "usr", "etc", *_SYSTEM_FOLDERS)


class HostImage(NamedTuple):
    """Parts of the host that the image `host` exposes, all read-only, as found when the launcher started."""

    links: dict[str, str]
    """/bin and the like, if they are links into /usr."""
    folders: tuple[str, ...]
    """/bin and the like, if they are folders of their own."""
    files: dict[str, bytes]
    """Contents of files in /etc, by their path relative to it."""
    covers: tuple[Cover, ...]
    """Files of /proc that no sandbox sees."""
    has_programs: bool
    """True if /usr can be shown with our programs for E2B's clients."""


class Layer(NamedTuple):
    """Read-only layer of an image, or a folder on the host. The ids of its files begin at `base_id`, which is 0 for an
    unpacked layer; for a snapshot, it is the base id of the original sandbox."""

    path: str
    base_id: int


class Image(NamedTuple):
    """Layers and settings from which sandboxes are built."""

    layers: tuple[Layer, ...]
    """Topmost first; empty for the plain host."""
    shows_host: bool
    """True if /usr and the like are the host's."""
    environment: dict[str, str]
    folder: str
    """Default working folder of commands, if it exists."""

    def above(self, layer: Layer) -> Image:
        """Return the image with another layer on top."""
        return self._replace(layers=(layer, *self.layers))


HOST: Final = Image((), True, {}, "/workspace")


class Mount(NamedTuple):
    """Path in a frozen sandbox: `path` in the root of the sandbox `source`, mounted at `target`; both paths are
    absolute."""

    source: str
    path: str
    target: str


class Folder(NamedTuple):
    """Folder on the host, mounted at the absolute path `target`. `id_map` is a user namespace or -1, as in
    `Root.id_maps`."""

    layer: Layer
    id_map: int
    target: str


class Root(NamedTuple):
    """Parts from which one sandbox's root is built. `id_maps` holds one user namespace per layer, in the same order, or
    -1 for a layer whose ids are shown unchanged."""

    sandbox_id: str
    base_id: int
    single_id: bool
    """True if the sandbox has no id other than its root's."""
    image: Image
    id_maps: tuple[int, ...]
    folders: tuple[Folder, ...]
    mounts: tuple[Mount, ...]
    source_image: Image
    """Image of the sandbox whose frozen paths are mounted; that sandbox has the same ids as this one."""
    source_id_maps: tuple[int, ...]
    has_sudo: bool
    """True if the host's /usr is shown with the program that asks the first process for root."""

    @property
    def all_id_maps(self) -> set[int]:
        """Descriptors needed to build the root."""
        return {*self.id_maps, *self.source_id_maps, *(folder.id_map for folder in self.folders)} - {-1}


class ImageUnusable(Exception):
    """The image cannot be used to build a sandbox."""


class MountRefused(Exception):
    """A frozen path cannot be mounted. The path is missing, leads through a symbolic link, or is a file while the new
    root has a folder there (or vice versa); or the target is not allowed."""


def build_launcher_root(
    base: str, *, single_id: bool, programs: Mapping[str, str] | None = None, size_bytes: int = 64 << 20
) -> HostImage:
    """Move this process into a new mount namespace with a private root mounted over the folder `base`. `programs` are
    texts by path below /usr, for the sandboxes that ask for them."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", base, "tmpfs", syscalls.MS_NOSUID, f"mode=755,size={size_bytes}")
    for name in ("usr", "dev", "dev/pts", "proc", "alternatives", "system", LAYERS, IMAGES, DEVICES, _FROZEN, _LOWER):
        os.mkdir(f"{base}/{name.strip('/')}", 0o755)
    for number in range(MAX_LAYERS):
        os.mkdir(f"{base}{_LOWER}/{number}", 0o755)
    no_devices = syscalls.MS_NOSUID | syscalls.MS_NODEV
    _bind_read_only("/usr", f"{base}/usr", no_devices)
    links, folders = {}, []
    for name in _SYSTEM_FOLDERS:
        if os.path.islink(f"/{name}"):
            links[name] = os.readlink(f"/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{base}/system/{name}", 0o755)
            _bind_read_only(f"/{name}", f"{base}/system/{name}", no_devices)
            folders.append(name)
    _make_devices(f"{base}/dev")
    # Debian's /usr/bin/awk and many others lead through links of /etc/alternatives into /usr: copy those.
    if os.path.isdir("/etc/alternatives"):
        for entry in os.scandir("/etc/alternatives"):
            if entry.is_symlink() and (target := os.readlink(entry.path)).startswith(("/usr/", "/bin/", "/lib/")):
                os.symlink(target, f"{base}/alternatives/{entry.name}")
    _bind_read_only(f"{base}/alternatives", f"{base}/alternatives", no_devices)
    files = {name: text.encode() for name, text in _ETC.items()}
    if os.path.isfile("/etc/ld.so.cache"):
        with open("/etc/ld.so.cache", "rb") as cache:
            files["ld.so.cache"] = cache.read()
    try:
        syscalls.mount("proc", f"{base}/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    except PermissionError:
        # Without root the pid namespace belongs to another user, but the host's view of it can be shown here.
        syscalls.mount("/proc", f"{base}/proc", flags=syscalls.MS_BIND | syscalls.MS_REC)
    covers = prepare_covers(base)
    for name, text in (programs or {}).items():
        os.makedirs(f"{base}{_PROGRAMS}/{os.path.dirname(name)}", exist_ok=True)
        with open(f"{base}{_PROGRAMS}/{name}", "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o755)
    os.mkdir(f"{base}{_USR_WITH_PROGRAMS}", 0o755)
    syscalls.pivot_into(base)
    options = "userxattr" if single_id else ""
    # An overlay shows no mounts below its layers.
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        mounted = [line.split(" ")[4] for line in table]
    shown = ("/usr", *(f"/system/{name}" for name in folders))
    plain = [path for path in shown if not any(point.startswith(f"{path}/") for point in mounted)]
    lower = f"{_PROGRAMS}:/usr"
    has_programs = "/usr" in plain and bool(programs) and show_folder(lower, _USR_WITH_PROGRAMS, no_devices, options)
    for path in plain:
        show_folder(path, path, no_devices, options)
    return HostImage(links, tuple(folders), files, covers, has_programs)


def _bind_read_only(source: str, target: str, flags: int) -> None:
    syscalls.mount(source, target, flags=syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.set_mount_flags(target, syscalls.MS_RDONLY | flags)


def _make_devices(folder: str) -> None:
    for name, (major, minor) in _DEVICES.items():
        path = f"{folder}/{name}"
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
            os.chmod(path, 0o666)
        except PermissionError:
            # A container without CAP_MKNOD may still show the host's own device.
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            syscalls.mount(f"/dev/{name}", path, flags=syscalls.MS_BIND)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{folder}/{name}")
    _bind_read_only(folder, folder, syscalls.MS_NOSUID | syscalls.MS_NOEXEC)


def make_layer(sandbox_id: str) -> str:
    """Make the empty folder for one sandbox's layer and return its path."""
    path = f"{LAYERS}/{sandbox_id}"
    os.mkdir(path, 0o755)
    return path


def mount_memory_layer(sandbox_id: str, base_id: int, size_bytes: int) -> None:
    """Mount a tmpfs owned by the sandbox's root as its layer, with the kernel's default of one inode per 4 KiB."""
    path = f"{LAYERS}/{sandbox_id}"
    options = f"mode=755,size={size_bytes},nr_inodes={max(size_bytes // 4096, 1024)},uid={base_id},gid={base_id}"
    syscalls.mount("tmpfs", path, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)


def layer_usage(sandbox_id: str) -> dict[str, int]:
    """Return disk_bytes and disk_limit_bytes of one sandbox's layer."""
    status = os.statvfs(f"{LAYERS}/{sandbox_id}")
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    return {"disk_bytes": used, "disk_limit_bytes": status.f_blocks * status.f_frsize}


def drop_layer(sandbox_id: str) -> None:
    with suppress(OSError):
        # A layer on disk is not mounted yet if its first process died early.
        syscalls.detach(f"{LAYERS}/{sandbox_id}")
    os.rmdir(f"{LAYERS}/{sandbox_id}")


def add_layer(number: int, mount: int, id_map: int) -> Layer:
    """Attach a host folder, given as a detached mount, as an image layer. Raises OSError, including when its file
    system cannot show files with other ids."""
    path = f"{IMAGES}/{number}"
    os.mkdir(path, 0o755)
    syscalls.attach_mount(mount, path)
    syscalls.set_mount_flags(path, syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV)
    layer = Layer(path, 0)
    trial = syscalls.copy_mount(path)
    try:
        if id_map >= 0:
            syscalls.map_mount_ids(trial, id_map)
    except OSError as error:
        drop_image_layer(layer)
        text = f"{error.strerror}: its file system does not support idmapped mounts; use ext4, xfs, btrfs or tmpfs"
        raise OSError(error.errno, text) from error
    finally:
        os.close(trial)
    return layer


def drop_image_layer(layer: Layer) -> None:
    syscalls.detach(layer.path)
    os.rmdir(layer.path)


def own_layer(sandbox_id: str, image: Image) -> str:
    """Return the folder of the files that a sandbox has written."""
    return f"{LAYERS}/{sandbox_id}/upper" if image.layers else f"{LAYERS}/{sandbox_id}"


def build_sandbox_root(root: Root, host: HostImage) -> None:
    """Build the sandbox's root and make it this process's root. The caller must be the sandbox's first process, already
    in its own mount, pid and net namespaces. Raises MountRefused, ImageUnusable, OSError."""
    layer = f"{LAYERS}/{root.sandbox_id}"
    path = f"{layer}/root" if root.image.layers else layer
    no_devices = syscalls.MS_NOSUID | syscalls.MS_NODEV
    if root.image.layers:
        for name in ("upper", "work", "root"):
            os.mkdir(f"{layer}/{name}", 0o755)
        os.chown(f"{layer}/upper", root.base_id, root.base_id)
        lower = _mount_layers(root.image, root.id_maps)
        options = f"lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work,{_overlay_options(root)}"
        syscalls.mount("overlay", path, "overlay", no_devices, options)
    syscalls.create_files_as(root.base_id, root.base_id)
    if not root.image.layers:
        _write_tree(path, host)
    elif not root.image.shows_host:
        _complete_tree(path)
    syscalls.create_files_as(0, 0)
    if not root.image.layers:
        os.mkdir(f"{path}/home/agent", 0o755)
        if not root.single_id:
            os.chown(f"{path}/home/agent", root.base_id + AGENT_ID, root.base_id + AGENT_ID)
    recursive_bind = syscalls.MS_BIND | syscalls.MS_REC
    if root.image.shows_host:
        usr = _USR_WITH_PROGRAMS if root.has_sudo and host.has_programs else "/usr"
        syscalls.mount(usr, f"{path}/usr", flags=recursive_bind)
        for name in host.folders:
            with suppress(FileExistsError):
                os.mkdir(f"{path}/{name}", 0o755)
            syscalls.mount(f"/system/{name}", f"{path}/{name}", flags=recursive_bind)
        syscalls.mount("/alternatives", f"{path}/etc/alternatives", flags=syscalls.MS_BIND)
    syscalls.mount("/dev", f"{path}/dev", flags=recursive_bind)
    no_programs = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    owner = "" if root.single_id else f",gid={root.base_id + 5}"
    options = f"newinstance,ptmxmode=0666,mode=620,max={_TERMINALS}{owner}"
    syscalls.mount("devpts", f"{path}/dev/pts", "devpts", no_programs, options)
    syscalls.mount("proc", f"{path}/proc", "proc", no_programs | syscalls.MS_NODEV)
    cover(f"{path}/proc", host.covers)
    for number, folder in enumerate(root.folders):
        target = _make_target(path, root.base_id, check_target(folder.target), folder=True)
        source = f"{_LOWER}/folder-{number}"
        with suppress(FileExistsError):
            os.mkdir(source, 0o755)
        _attach(folder.layer, folder.id_map, source)
        if not show_folder(source, target, no_devices):
            syscalls.mount(source, target, flags=syscalls.MS_BIND)
            syscalls.set_mount_flags(target, no_devices | syscalls.MS_RDONLY)
    for frozen in root.mounts:
        _mount_frozen(path, root, frozen)
    syscalls.pivot_into(path)
    if not os.access("/bin/bash", os.X_OK):
        raise ImageUnusable("the image has no executable /bin/bash, which runs the commands")


def _overlay_options(root: Root) -> str:
    """Return the options that select how overlayfs stores its attributes. These belong to the owner of the file system,
    which without root is this user namespace."""
    # Without metacopy, what a sandbox has written holds all contents by itself, and can be copied (images.layer_copy).
    return "userxattr" if root.single_id else "redirect_dir=on,metacopy=off"


def _mount_layers(image: Image, id_maps: tuple[int, ...]) -> str:
    """Attach the layers in this mount namespace and return them in the format of `lowerdir` (overlayfs.rst)."""
    for number, (layer, id_map) in enumerate(zip(image.layers, id_maps, strict=True)):
        _attach(layer, id_map, f"{_LOWER}/{number}")
    return ":".join(f"{_LOWER}/{number}" for number in range(len(image.layers)))


def _attach(layer: Layer, id_map: int, target: str) -> None:
    """Attach a layer at `target` with ids mapped by `id_map`; it is read-only there too."""
    mount = syscalls.copy_mount(layer.path)
    try:
        if id_map >= 0:
            syscalls.map_mount_ids(mount, id_map)
        syscalls.attach_mount(mount, target)
    finally:
        os.close(mount)


def _write_tree(root: str, image: HostImage) -> None:
    for name, mode in _FOLDERS:
        os.mkdir(f"{root}/{name}", mode)
        if mode & 0o1022:
            os.chmod(f"{root}/{name}", mode)
    for name, target in image.links.items():
        os.symlink(target, f"{root}/{name}")
    os.symlink("/proc/self/mounts", f"{root}/etc/mtab")
    for name, content in image.files.items():
        _write_file(f"{root}/etc/{name}", content)


def _write_file(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    os.write(descriptor, content)
    os.close(descriptor)


def _complete_tree(root: str) -> None:
    """Add folders and files that a foreign image may lack, without following links or changing its own files."""
    for name, mode in _NEEDED_FOLDERS:
        path = f"{root}/{name}"
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            raise ImageUnusable(f"/{name} of the image is not a folder")
        with suppress(FileExistsError):
            os.mkdir(path, mode)
            os.chmod(path, mode)
    for name in ("hosts", "hostname"):
        if not os.path.lexists(f"{root}/etc/{name}"):
            _write_file(f"{root}/etc/{name}", _ETC[name].encode())


def check_target(target: str) -> list[str]:
    """Return the parts of an absolute path below the sandbox's own layer. Raises MountRefused."""
    parts = [part for part in target.split("/") if part]
    if not target.startswith("/") or not parts or {".", ".."} & set(parts) or parts[0] in _FORBIDDEN_TARGETS:
        raise MountRefused(f"mount target {target!r}: use an absolute path outside {', '.join(_FORBIDDEN_TARGETS)}")
    return parts


def _mount_frozen(path: str, root: Root, frozen: Mount) -> None:
    parts = check_target(frozen.target)
    # The whole root of the dead sandbox: its own layer, or an overlay of it above its image's.
    shown = f"{LAYERS}/{frozen.source}"
    if root.source_image.layers:
        shown = _FROZEN
        if not os.path.ismount(_FROZEN):
            lower = _mount_layers(root.source_image, root.source_id_maps)
            options = f"lowerdir={LAYERS}/{frozen.source}/upper:{lower},{_overlay_options(root)}"
            syscalls.mount("overlay", _FROZEN, "overlay", syscalls.MS_RDONLY, options)
    folder = os.open(shown, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        resolve = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
        name = frozen.path.strip("/") or "."
        source = syscalls.open_resolved(folder, name, os.O_PATH | os.O_NOFOLLOW, resolve)
    except OSError as error:
        reason = "leads through a symbolic link" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
        raise MountRefused(f"frozen path {frozen.path!r}: {reason}") from error
    finally:
        os.close(folder)
    try:
        mode = os.fstat(source).st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise MountRefused(f"frozen path {frozen.path!r}: neither a folder nor a regular file")
        target = _make_target(path, root.base_id, parts, folder=stat.S_ISDIR(mode))
        if os.path.isdir(target) != stat.S_ISDIR(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a file"
            raise MountRefused(f"frozen path {frozen.path!r}: it is {kind}, unlike its target")
        syscalls.mount(f"/proc/self/fd/{source}", target, flags=syscalls.MS_BIND)
    finally:
        os.close(source)
    flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.set_mount_flags(target, flags)


def _make_target(root: str, base_id: int, parts: list[str], *, folder: bool) -> str:
    """Make the folders (and the file) for a mount point and return its path. This fails below an earlier read-only
    mount, which is intended."""
    path = root
    for position, part in enumerate(parts):
        path = f"{path}/{part}"
        if os.path.islink(path):
            # An earlier frozen mount may contain links of the agent's: following one would mount outside this root.
            raise MountRefused(f"mount target below {path.removeprefix(root)!r}: leads through a symbolic link")
        if os.path.lexists(path):
            continue
        if folder or position < len(parts) - 1:
            os.mkdir(path, 0o755)
            os.chown(path, base_id, base_id)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    return path


def limit_shared_memory(most_bytes: int) -> None:
    """Limit the System V objects in this IPC namespace: `most_bytes` of segments in total, 2 MiB of messages, 4,096
    semaphores. Their memory is charged to no process, so that killing a process would not free it."""
    for name, value in (("shmall", str(most_bytes // 4096)), ("msgmni", "128"), ("sem", "250 4096 32 128")):
        with open(f"/proc/sys/kernel/{name}", "w", encoding="utf-8") as setting:
            setting.write(value)


def raise_loopback() -> None:
    """Bring up `lo` in this network namespace and let every user bind low ports (`SIOCSIFFLAGS`, netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w", encoding="utf-8") as setting:
        setting.write("0")
