# ruff: noqa: PTH101, PTH102, PTH106, PTH112, PTH113, PTH114, PTH115, PTH123, PTH211
# (pathlib stays out of the launcher: what is not imported is not copied at a fork)
"""What a sandbox sees: the file trees of the launcher and of each sandbox, built with direct mounts.

Invariants:
- The launcher lives in a mount namespace of its own whose root is a private tmpfs: the host's /root, /home, /var, /etc
  are not there, so no mistake further down can reach them, and everything vanishes with the last process.
- Each sandbox has one size-capped tmpfs, `/layers/<id>` for the launcher and `/` for itself, or the upper layer of its
  `/` above the read-only layers of an image. Nothing else is writable.
- Layers of images are shown with the ids of the sandbox by mapped mounts: nothing is copied or changed.
- Layers are built by real root before the sandbox's user namespace exists: the sandbox owns none of its mounts and
  cannot change them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from contextlib import suppress
from typing import Final, NamedTuple

from headrace.sandboxes.kernel import syscalls

LAYERS: Final = "/layers"
IMAGES: Final = "/images"
DEVICES: Final = "/devices"
"""Where loop devices are made for a moment."""
MAX_LAYERS: Final = 128
"""Of one image; overlayfs takes up to 500, as long as their names fit in a page."""
_TERMINALS: Final = 32
"""Of one sandbox; the host has some 3,000 for all (kernel.pty.max)."""
_LOWER: Final = "/lower"
_FROZEN: Final = "/frozen"

_SYSTEM_FOLDERS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES: Final = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
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
_NEEDED_FOLDERS: Final = (
    ("etc", 0o755),
    ("dev", 0o755),
    ("proc", 0o555),
    ("tmp", 0o1777),
    ("workspace", 0o777),
)
"""/dev/shm leads to /run/shm, which an image makes itself where it needs it."""
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
    """The parts of the host that the image `host` shows, all read-only, as found when the launcher started."""

    links: dict[str, str]
    """/bin and its like where they are links into /usr."""
    folders: tuple[str, ...]
    """/bin and its like where they are folders of their own."""
    files: dict[str, bytes]
    """Files of /etc, by name below it."""


class Layer(NamedTuple):
    """A read-only layer of an image, or a folder of the host. Its files belong to ids that begin at `base_id`: 0 as
    they were unpacked, that of the sandbox whose snapshot it is otherwise."""

    path: str
    base_id: int


class Image(NamedTuple):
    """What sandboxes are made of."""

    layers: tuple[Layer, ...]
    """Topmost first; none for the plain host."""
    shows_host: bool
    """/usr and its like are the host's."""
    environment: dict[str, str]
    folder: str
    """Where commands start unless told otherwise, if it is there."""

    def above(self, layer: Layer) -> Image:
        """The image with a further layer on top."""
        return self._replace(layers=(layer, *self.layers))


HOST: Final = Image((), True, {}, "/workspace")


class Mount(NamedTuple):
    """A frozen path: `path` in the root of the sandbox `source`, shown at `target`, both absolute."""

    source: str
    path: str
    target: str


class Folder(NamedTuple):
    """A folder of the host, shown at `target`, absolute. `id_map` as in `Root`."""

    layer: Layer
    id_map: int
    target: str


class Root(NamedTuple):
    """What one sandbox's root is built from. `id_maps` are user namespaces for the layers, in their order, or -1 where
    ids are shown as they are."""

    sandbox_id: str
    base_id: int
    single_id: bool
    """There is no other id than that of root inside."""
    image: Image
    id_maps: tuple[int, ...]
    folders: tuple[Folder, ...]
    mounts: tuple[Mount, ...]
    source_image: Image
    """Of the sandbox whose frozen paths are shown; it has the ids of this one."""
    source_id_maps: tuple[int, ...]

    @property
    def all_id_maps(self) -> set[int]:
        """Descriptors that building it needs."""
        return {*self.id_maps, *self.source_id_maps, *(folder.id_map for folder in self.folders)} - {-1}


class ImageUnusable(Exception):
    """No sandbox can be made of the image."""


class MountRefused(Exception):
    """The frozen path is missing, leads through a symbolic link or is a file where the new root has a folder (or the
    other way round), or the target is not allowed."""


def build_launcher_root(base: str, size_bytes: int = 64 << 20) -> HostImage:
    """Move this process into a new mount namespace with a private root, mounted over the folder `base`."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", base, "tmpfs", syscalls.MS_NOSUID, f"mode=755,size={size_bytes}")
    for name in ("usr", "dev", "dev/pts", "proc", "alternatives", "system", LAYERS, IMAGES, DEVICES, _FROZEN, _LOWER):
        os.mkdir(f"{base}/{name.strip('/')}", 0o755)
    for number in range(MAX_LAYERS):
        os.mkdir(f"{base}{_LOWER}/{number}", 0o755)
    _bind_read_only("/usr", f"{base}/usr", syscalls.MS_NOSUID | syscalls.MS_NODEV)
    links, folders = {}, []
    for name in _SYSTEM_FOLDERS:
        if os.path.islink(f"/{name}"):
            links[name] = os.readlink(f"/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{base}/system/{name}", 0o755)
            _bind_read_only(f"/{name}", f"{base}/system/{name}", syscalls.MS_NOSUID | syscalls.MS_NODEV)
            folders.append(name)
    _make_devices(f"{base}/dev")
    _copy_alternatives(f"{base}/alternatives")
    files = {name: text.encode() for name, text in _ETC.items()}
    if os.path.isfile("/etc/ld.so.cache"):
        with open("/etc/ld.so.cache", "rb") as cache:
            files["ld.so.cache"] = cache.read()
    _mount_launcher_proc(f"{base}/proc")
    syscalls.pivot_into(base)
    return HostImage(links, tuple(folders), files)


def _mount_launcher_proc(target: str) -> None:
    try:
        syscalls.mount("proc", target, "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    except PermissionError:
        # Without root the pid namespace is somebody else's, but what the host shows of it can be shown here.
        syscalls.mount("/proc", target, flags=syscalls.MS_BIND | syscalls.MS_REC)


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


def _copy_alternatives(folder: str) -> None:
    """Debian's /usr/bin/awk and many others lead through links of /etc/alternatives into /usr: keep those."""
    if os.path.isdir("/etc/alternatives"):
        for entry in os.scandir("/etc/alternatives"):
            if entry.is_symlink() and (target := os.readlink(entry.path)).startswith(("/usr/", "/bin/", "/lib/")):
                os.symlink(target, f"{folder}/{entry.name}")
    _bind_read_only(folder, folder, syscalls.MS_NOSUID | syscalls.MS_NODEV)


def make_layer(sandbox_id: str) -> str:
    """The place of one sandbox's layer, empty yet."""
    path = f"{LAYERS}/{sandbox_id}"
    os.mkdir(path, 0o755)
    return path


def mount_memory_layer(sandbox_id: str, base_id: int, size_bytes: int) -> None:
    """Make a tmpfs owned by the sandbox's root. One inode for every 4 KiB, as the kernel does by itself."""
    path = f"{LAYERS}/{sandbox_id}"
    options = f"mode=755,size={size_bytes},nr_inodes={max(size_bytes // 4096, 1024)},uid={base_id},gid={base_id}"
    syscalls.mount("tmpfs", path, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)


def layer_usage(sandbox_id: str) -> dict[str, int]:
    """disk_bytes and disk_limit_bytes of one sandbox's layer."""
    status = os.statvfs(f"{LAYERS}/{sandbox_id}")
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    return {"disk_bytes": used, "disk_limit_bytes": status.f_blocks * status.f_frsize}


def drop_layer(sandbox_id: str) -> None:
    with suppress(OSError):
        # A layer on disk is not there yet when its maker dies early.
        syscalls.detach(f"{LAYERS}/{sandbox_id}")
    os.rmdir(f"{LAYERS}/{sandbox_id}")


def add_layer(number: int, mount: int, id_map: int) -> Layer:
    """Attach a folder of the host, given as a mount that is attached nowhere, as a layer of images.

    Raises OSError, also where the file system cannot show its files with other ids.
    """
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
        text = f"{error.strerror}: its file system cannot be shown with other ids; use ext4, xfs, btrfs or tmpfs"
        raise OSError(error.errno, text) from error
    finally:
        os.close(trial)
    return layer


def drop_image_layer(layer: Layer) -> None:
    syscalls.detach(layer.path)
    os.rmdir(layer.path)


def own_layer(sandbox_id: str, image: Image) -> str:
    """Where the files lie that a sandbox has written."""
    return f"{LAYERS}/{sandbox_id}/upper" if image.layers else f"{LAYERS}/{sandbox_id}"


def build_sandbox_root(root: Root, host: HostImage) -> None:
    """Called in the sandbox's first process, already in its own mount, pid and net namespaces: ends with the new root.

    Raises MountRefused, ImageUnusable, OSError.
    """
    layer = f"{LAYERS}/{root.sandbox_id}"
    path = f"{layer}/root" if root.image.layers else layer
    if root.image.layers:
        _mount_image(layer, root)
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
    if root.image.shows_host:
        _mount_system(path, host)
    _mount_kernel(path, root)
    for folder in root.folders:
        _attach(folder.layer, folder.id_map, _make_target(path, root.base_id, check_target(folder.target), folder=True))
    for frozen in root.mounts:
        _mount_frozen(path, root, frozen)
    syscalls.pivot_into(path)
    if not os.access("/bin/bash", os.X_OK):
        raise ImageUnusable("the image has no /bin/bash, which runs the commands")


def _mount_image(layer: str, root: Root) -> None:
    """The image's layers, shown with the sandbox's ids, below what it will write itself."""
    for name in ("upper", "work", "root"):
        os.mkdir(f"{layer}/{name}", 0o755)
    os.chown(f"{layer}/upper", root.base_id, root.base_id)
    lower = _mount_layers(root.image, root.id_maps)
    options = f"lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work,{_overlay_options(root)}"
    syscalls.mount("overlay", f"{layer}/root", "overlay", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)


def _overlay_options(root: Root) -> str:
    """Attributes of the overlay are the owner's of the file system, which without root is this user namespace."""
    return "userxattr" if root.single_id else "redirect_dir=on"


def _mount_layers(image: Image, id_maps: tuple[int, ...]) -> str:
    """Attach the layers in this mount namespace. Returns them as overlayfs wants them (overlayfs.rst)."""
    for number, (layer, id_map) in enumerate(zip(image.layers, id_maps, strict=True)):
        _attach(layer, id_map, f"{_LOWER}/{number}")
    return ":".join(f"{_LOWER}/{number}" for number in range(len(image.layers)))


def _attach(layer: Layer, id_map: int, target: str) -> None:
    """Show it there, read-only as it is at its own place, with the ids of the map."""
    mount = syscalls.copy_mount(layer.path)
    try:
        if id_map >= 0:
            syscalls.map_mount_ids(mount, id_map)
        syscalls.attach_mount(mount, target)
    finally:
        os.close(mount)


def _mount_system(path: str, host: HostImage) -> None:
    recursive_bind = syscalls.MS_BIND | syscalls.MS_REC
    syscalls.mount("/usr", f"{path}/usr", flags=recursive_bind)
    for name in host.folders:
        with suppress(FileExistsError):
            os.mkdir(f"{path}/{name}", 0o755)
        syscalls.mount(f"/system/{name}", f"{path}/{name}", flags=recursive_bind)
    syscalls.mount("/alternatives", f"{path}/etc/alternatives", flags=syscalls.MS_BIND)


def _mount_kernel(path: str, root: Root) -> None:
    syscalls.mount("/dev", f"{path}/dev", flags=syscalls.MS_BIND | syscalls.MS_REC)
    safe = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    terminals = f"newinstance,ptmxmode=0666,mode=620,max={_TERMINALS}"
    owner = "" if root.single_id else f",gid={root.base_id + 5}"
    syscalls.mount("devpts", f"{path}/dev/pts", "devpts", safe, terminals + owner)
    syscalls.mount("proc", f"{path}/proc", "proc", safe | syscalls.MS_NODEV)


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
    """What an image from elsewhere may lack. Its own files and links stay as they are; none of them is followed."""
    for name, mode in _NEEDED_FOLDERS:
        path = f"{root}/{name}"
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            raise ImageUnusable(f"the image has something else than a folder at /{name}")
        with suppress(FileExistsError):
            os.mkdir(path, mode)
            os.chmod(path, mode)
    for name in ("hosts", "hostname"):
        if not os.path.lexists(f"{root}/etc/{name}"):
            _write_file(f"{root}/etc/{name}", _ETC[name].encode())


def check_target(target: str) -> list[str]:
    """The parts of an absolute path below the sandbox's own layer. Raises MountRefused."""
    parts = [part for part in target.split("/") if part]
    if not target.startswith("/") or not parts or {".", ".."} & set(parts) or parts[0] in _FORBIDDEN_TARGETS:
        raise MountRefused(f"mount target {target!r}: use an absolute path outside {', '.join(_FORBIDDEN_TARGETS)}")
    return parts


def _mount_frozen(path: str, root: Root, frozen: Mount) -> None:
    parts = check_target(frozen.target)
    source = _open_frozen(root, frozen)
    try:
        folder = stat.S_ISDIR(os.fstat(source).st_mode)
        target = _make_target(path, root.base_id, parts, folder=folder)
        if os.path.isdir(target) != folder:
            raise MountRefused(f"frozen path {frozen.path!r}: is {'a' if folder else 'no'} folder, unlike its target")
        syscalls.mount(f"/proc/self/fd/{source}", target, flags=syscalls.MS_BIND)
    finally:
        os.close(source)
    flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.set_mount_flags(target, flags)


def _frozen_root(root: Root, source: str) -> str:
    """Where the whole root of the dead sandbox can be seen: its own layer, or that above its image's."""
    if not root.source_image.layers:
        return f"{LAYERS}/{source}"
    if not os.path.ismount(_FROZEN):
        lower = _mount_layers(root.source_image, root.source_id_maps)
        options = f"lowerdir={LAYERS}/{source}/upper:{lower},{_overlay_options(root)}"
        syscalls.mount("overlay", _FROZEN, "overlay", syscalls.MS_RDONLY, options)
    return _FROZEN


def _open_frozen(root: Root, frozen: Mount) -> int:
    """Open a path of a dead layer, which nobody changes any more, without following any link. Raises MountRefused."""
    layer = os.open(_frozen_root(root, frozen.source), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = frozen.path.strip("/") or "."
        resolve = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
        descriptor = syscalls.open_resolved(layer, path, os.O_PATH | os.O_NOFOLLOW, resolve)
    except OSError as error:
        reason = "leads through a symbolic link" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
        raise MountRefused(f"frozen path {frozen.path!r}: {reason}") from error
    finally:
        os.close(layer)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        os.close(descriptor)
        raise MountRefused(f"frozen path {frozen.path!r}: neither a folder nor a regular file")
    return descriptor


def _make_target(root: str, base_id: int, parts: list[str], *, folder: bool) -> str:
    """Folders (and a file) for a mount point. An earlier read-only mount on the way makes this fail, which is right."""
    path = root
    for position, part in enumerate(parts):
        path = f"{path}/{part}"
        if os.path.islink(path):
            # An earlier frozen mount may hold links of the agent's: following one would mount outside this root.
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
    """Cap what System V objects of this IPC namespace can hold: it is charged to no process, so that killing none frees
    it. Segments of `most_bytes` in all, 2 MiB of messages, 4,096 semaphores."""
    for name, value in (("shmall", str(most_bytes // 4096)), ("msgmni", "128"), ("sem", "250 4096 32 128")):
        with open(f"/proc/sys/kernel/{name}", "w", encoding="utf-8") as setting:
            setting.write(value)


def raise_loopback() -> None:
    """Bring `lo` up in this network namespace and let everyone bind low ports there (`SIOCSIFFLAGS`, netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w", encoding="utf-8") as setting:
        setting.write("0")
