//! The port between the sans-IO core and a driver: what can be asked of a disk and of a socket, and what comes back.
//!
//! The core names files by a [`FileId`] of its own choice, so that it can queue a write behind an open without
//! waiting. Operations of one file that depend on each other are never in flight together; the driver may complete
//! operations in any order. A buffer handed over in an operation is immutable until its completion.

pub mod buf;
pub mod mailbox;
pub mod probe;
pub mod sim;
pub mod uring;

use std::fmt;

use buf::{AppendBuf, BufSlice};
use thiserror::Error;

/// A file as the core names it; the core picks the number, the driver maps it to a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// Names an operation in flight; its completion carries the same id. Never reused within a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// What kind of bytes a file holds: for per-class fault plans, metrics and open flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FileClass {
    /// Journal files: opened O_DIRECT | O_DSYNC.
    Journal,
    /// Checkpoint snapshots: O_DIRECT, synced explicitly.
    Checkpoint,
    /// Segment files: O_DIRECT, synced at checkpoints.
    Segment,
    /// Offset and time indexes: O_DIRECT, written in whole blocks.
    Index,
    /// Leader-epoch checkpoints and producer snapshots.
    Epochs,
    /// Small identity files (`node.meta`, `journal-set`, `partition.meta`); buffered.
    Meta,
}

/// How to open a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenHow {
    /// Class of the file; decides direct I/O and O_DSYNC (see [`FileClass`]).
    pub class: FileClass,
    /// Create the file when it is missing (never truncates an existing one).
    pub create: bool,
    /// Open for writing too.
    pub write: bool,
}

/// An operation on the disk. Paths are relative to the data directory and use `/`.
#[derive(Debug, Clone)]
pub enum DiskOp {
    /// Opens `path` as `file`. Completes with [`Done::Opened`] and the file's length.
    Open {
        file: FileId,
        path: String,
        how: OpenHow,
    },
    /// Closes `file`; the id is free for reuse after the completion.
    Close { file: FileId },
    /// Writes `bufs`, one after the other, at `pos`. Completes when all bytes are written (the driver resubmits
    /// after a short write, EINTR and EAGAIN), durable when the class says O_DSYNC.
    Write {
        file: FileId,
        pos: u64,
        bufs: Vec<BufSlice>,
    },
    /// Reads up to `len` bytes at `pos`; fewer only at the end of the file. Completes with [`Done::Read`].
    Read { file: FileId, pos: u64, len: usize },
    /// fdatasync.
    Sync { file: FileId },
    /// Sets the length (ftruncate).
    Resize { file: FileId, len: u64 },
    /// Allocates the range and extends the length to cover it (fallocate, mode 0).
    Allocate { file: FileId, pos: u64, len: u64 },
    /// Renames; replaces an existing target.
    Rename { from: String, to: String },
    /// Removes a file. A missing one is [`DiskError::NotFound`].
    Unlink { path: String },
    /// Makes one directory. An existing one is [`DiskError::Exists`].
    MakeDir { path: String },
    /// Removes an empty directory.
    RemoveDir { path: String },
    /// fsync of a directory, so that names in it survive a power cut.
    SyncDir { path: String },
    /// syncfs of the data directory's file system (on a helper thread of the driver).
    SyncAll,
    /// Lists a directory. Completes with [`Done::Listed`].
    List { path: String },
}

/// One name in a directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirEntry {
    /// The name, without the directory.
    pub name: String,
    /// Whether it is a directory itself.
    pub is_dir: bool,
    /// Length in bytes (0 for directories).
    pub len: u64,
}

/// A successful completion.
#[derive(Debug, Clone)]
pub enum Done {
    /// The operation has nothing to tell but success.
    Ok,
    /// The file is open and this long.
    Opened { len: u64 },
    /// The bytes read; in a buffer aligned for direct I/O.
    Read(BufSlice),
    /// The names of a directory, sorted.
    Listed(Vec<DirEntry>),
}

/// Why a disk operation failed. A failed write or sync is final for what it covered: never retried (D1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DiskError {
    /// ENOSPC or EDQUOT.
    #[error("no space left on the device")]
    NoSpace,
    /// ENOENT.
    #[error("no such file or directory")]
    NotFound,
    /// EEXIST or ENOTEMPTY.
    #[error("the file exists or the directory is not empty")]
    Exists,
    /// EACCES, EPERM or EROFS.
    #[error("permission denied (errno {0})")]
    Denied(i32),
    /// EMFILE or ENFILE.
    #[error("too many open files; raise LimitNOFILE")]
    TooManyFiles,
    /// Any other errno; EIO above all.
    #[error("input/output error (errno {0})")]
    Io(i32),
}

/// The end of a disk operation.
#[derive(Debug, Clone)]
pub struct Completion {
    /// The operation's id.
    pub op: OpId,
    /// What became of it.
    pub result: Result<Done, DiskError>,
}

/// A disk that executes operations to their end: start-up and recovery use it before a shard serves anything.
///
/// The real ring and the simulator both implement it. Operations of one call run concurrently and complete in any
/// order; the results come back in the order of `ops`.
pub trait Disk {
    /// Runs all of `ops`; `Err` when the disk is gone for good (a dead ring, a simulated crash).
    fn run(&mut self, ops: Vec<DiskOp>) -> Result<Vec<Result<Done, DiskError>>, DiskGone>;

    /// Alignment that direct I/O needs on this disk, and the least journal frame grain: a power of two >= 4096.
    fn grain(&self) -> usize;
}

/// The disk will execute nothing more.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the disk driver stopped: {0}")]
pub struct DiskGone(pub String);

/// A connection as driver and core name it. A slot is reused only with another generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId {
    /// Slot.
    pub slot: u32,
    /// Generation of the slot.
    pub generation: u32,
}

impl fmt::Display for ConnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

/// A connection's descriptor on its way from one shard to another; closes it when dropped.
pub type Socket = std::os::fd::OwnedFd;

/// An operation on the network.
#[derive(Debug)]
pub enum NetOp {
    /// Sends the slices one after the other, after everything sent before on this connection.
    Send { conn: ConnId, bufs: Vec<BufSlice> },
    /// Stops receiving (back-pressure); bytes already received still arrive.
    Pause { conn: ConnId },
    /// Receives again.
    Resume { conn: ConnId },
    /// Puts the next `len` bytes that arrive behind those in `buf`, which has room for them, instead of delivering
    /// them: large requests arrive in place. Completes with [`NetEvent::Filled`]; at most one per connection.
    Fill {
        conn: ConnId,
        buf: AppendBuf,
        len: usize,
    },
    /// Closes after what was queued for sending is sent, or at once with `abort`.
    Close { conn: ConnId, abort: bool },
    /// Stops all I/O and gives the descriptor up; completes with [`NetEvent::Released`].
    Release { conn: ConnId },
    /// Takes over a connection released by another shard, under `conn` picked by the driver; completes with
    /// [`NetEvent::Adopted`] carrying `tag`.
    Adopt { socket: Socket, tag: u64 },
}

/// What happened on the network.
#[derive(Debug)]
pub enum NetEvent<'a> {
    /// A new connection on a listener.
    Accepted {
        conn: ConnId,
        listener: u16,
        peer: std::net::SocketAddr,
    },
    /// Bytes received; only valid during the call that delivers them.
    Received { conn: ConnId, data: &'a [u8] },
    /// What [`NetOp::Fill`] asked for is in `buf`. A connection that ends before that drops its buffer.
    Filled { conn: ConnId, buf: AppendBuf },
    /// `bytes` more of what was queued have been sent.
    Sent { conn: ConnId, bytes: usize },
    /// The connection is gone (peer closed, error, or closed by us); its id is dead.
    Closed { conn: ConnId },
    /// The connection left this shard; its id is dead.
    Released { conn: ConnId, socket: Socket },
    /// An adopted connection is ready.
    Adopted { conn: ConnId, tag: u64 },
}
