//! Disk operations on the ring: files by id, operations in flight with everything the kernel reads or writes.
//!
//! Invariants: a flight owns its buffers, paths and descriptors until its final completion. A write continues after
//! a short write with the rest of the same bytes at the same place; EINTR and EAGAIN are tried again a bounded number
//! of times; every other error of a write and any error of a sync is final (D1). Paths never leave the data directory.

use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use io_uring::{opcode, squeue, types};

use super::helper::{Helper, Work, duplicate};
use super::ring::{Kind, Ring, Tag, last_errno};
use super::slab::{Key, Slab};
use crate::io::buf::{AppendBuf, BufSlice};
use crate::io::{Completion, DiskError, DiskOp, Done, FileClass, FileId, OpId, OpenHow};

/// Longest vector one write takes (UIO_MAXIOV); longer ones continue like short writes.
const MAX_IOVECS: usize = 1024;

/// Most bytes asked of one read or write; the kernel's own limit is just below 2 GiB.
const MAX_TRANSFER: usize = 1 << 30;

/// How often an operation is tried again after EINTR or EAGAIN before that is its error.
const MAX_RETRIES: u8 = 64;

const FILE_MODE: libc::mode_t = 0o640;
const DIR_MODE: libc::mode_t = 0o750;

/// The kind of error that an errno of a disk operation is.
pub(super) fn disk_error(errno: i32) -> DiskError {
    match errno {
        libc::ENOSPC | libc::EDQUOT => DiskError::NoSpace,
        libc::ENOENT => DiskError::NotFound,
        libc::EEXIST | libc::ENOTEMPTY => DiskError::Exists,
        libc::EACCES | libc::EPERM | libc::EROFS => DiskError::Denied(errno),
        libc::EMFILE | libc::ENFILE => DiskError::TooManyFiles,
        _ => DiskError::Io(errno),
    }
}

/// File ids are small numbers of the core's choice: one multiplication spreads them.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, id: u32) {
        self.0 = (self.0 ^ u64::from(id)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[derive(Clone)]
struct OpenFile {
    fd: Rc<OwnedFd>,
    class: FileClass,
    direct: bool,
}

struct WriteFlight {
    fd: Rc<OwnedFd>,
    pos: u64,
    bufs: Vec<BufSlice>,
    total: usize,
    done: usize,
    iovecs: Vec<libc::iovec>,
}

struct ReadFlight {
    fd: Rc<OwnedFd>,
    /// First byte read: the asked position, rounded down for direct I/O.
    pos: u64,
    /// Bytes read before the asked position.
    skip: usize,
    /// Bytes asked for.
    len: usize,
    /// Bytes to read: `skip + len`, rounded up for direct I/O.
    span: usize,
    got: usize,
    buf: AppendBuf,
}

enum Step {
    Open {
        file: FileId,
        path: CString,
        how: OpenHow,
        direct: bool,
    },
    Close(RawFd),
    Write(WriteFlight),
    Read(ReadFlight),
    Sync(Rc<OwnedFd>),
    Resize(Rc<OwnedFd>, u64),
    Allocate {
        fd: Rc<OwnedFd>,
        pos: u64,
        len: u64,
    },
    Rename(CString, CString),
    Unlink {
        path: CString,
        flags: i32,
    },
    MakeDir(CString),
    OpenDir(CString),
    SyncDir(OwnedFd),
    /// The helper thread has it.
    Helper,
}

struct Flight {
    op: OpId,
    step: Step,
    retries: u8,
}

/// Files and operations of one reactor.
pub(super) struct DiskDriver {
    root: Arc<OwnedFd>,
    align: usize,
    files: HashMap<FileId, OpenFile, BuildHasherDefault<IdHasher>>,
    flights: Slab<Flight>,
    queue: VecDeque<(OpId, DiskOp)>,
    depth: usize,
    helper: Helper,
    /// Ended without the ring's help; delivered by the next turn.
    ready: VecDeque<Completion>,
    direct_refused: bool,
}

impl DiskDriver {
    pub(super) fn new(root: OwnedFd, align: usize, depth: usize) -> Result<DiskDriver, i32> {
        Ok(DiskDriver {
            root: Arc::new(root),
            align,
            files: HashMap::default(),
            flights: Slab::new(),
            queue: VecDeque::new(),
            depth: depth.max(1),
            helper: Helper::new()?,
            ready: VecDeque::new(),
            direct_refused: false,
        })
    }

    /// Descriptor to read eight bytes from: done when the helper thread has answers.
    pub(super) fn helper_bell(&self) -> RawFd {
        self.helper.bell()
    }

    /// Whether some file had to be opened without direct I/O.
    pub(super) fn direct_refused(&self) -> bool {
        self.direct_refused
    }

    /// Operations taken and not yet ended.
    pub(super) fn pending(&self) -> usize {
        self.flights.len() + self.queue.len() + self.ready.len()
    }

    /// Whether [`DiskDriver::pop_ready`] has something.
    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub(super) fn pop_ready(&mut self) -> Option<Completion> {
        self.ready.pop_front()
    }

    /// Takes an operation. Above the depth it waits here, except on the journal, which is never kept waiting.
    pub(super) fn submit(&mut self, ring: &mut Ring, op: OpId, disk_op: DiskOp) {
        if self.flights.len() >= self.depth && !self.is_journal(&disk_op) {
            self.queue.push_back((op, disk_op));
        } else {
            self.start(ring, op, disk_op);
        }
    }

    fn is_journal(&self, disk_op: &DiskOp) -> bool {
        match disk_op {
            DiskOp::Write { file, .. } | DiskOp::Sync { file } => self
                .files
                .get(file)
                .is_some_and(|open| open.class == FileClass::Journal),
            _ => false,
        }
    }

    fn start(&mut self, ring: &mut Ring, op: OpId, disk_op: DiskOp) {
        let started = match disk_op {
            // It needs no descriptor of its own: a sync must not fail because there is none left.
            DiskOp::SyncAll => self.start_helper(op, |root| Ok(Work::SyncFs(Arc::clone(root)))),
            DiskOp::List { path } => self.start_helper(op, |root| {
                Ok(Work::List(Arc::clone(root), directory_path(&path)?))
            }),
            DiskOp::Resize { file, len } if !ring.features.ftruncate => self
                .file(file)
                .and_then(|open| self.start_helper(op, |_| Ok(Work::Truncate(duplicate(&open.fd)?, len)))),
            DiskOp::Write { bufs, .. } if bufs.iter().all(|buf| buf.is_empty()) => {
                self.ready.push_back(Completion {
                    op,
                    result: Ok(Done::Ok),
                });
                Ok(())
            }
            other => self.first_step(other).map(|step| {
                let key = self.flights.insert(Flight { op, step, retries: 0 });
                self.push(ring, key);
            }),
        };
        if let Err(error) = started {
            self.ready.push_back(Completion {
                op,
                result: Err(error),
            });
        }
    }

    fn start_helper(
        &mut self,
        op: OpId,
        work: impl FnOnce(&Arc<OwnedFd>) -> Result<Work, DiskError>,
    ) -> Result<(), DiskError> {
        let work = work(&self.root)?;
        let key = self.flights.insert(Flight {
            op,
            step: Step::Helper,
            retries: 0,
        });
        self.helper.run(key, work).inspect_err(|_| {
            self.flights.remove(key);
        })
    }

    fn file(&self, file: FileId) -> Result<OpenFile, DiskError> {
        self.files.get(&file).cloned().ok_or(DiskError::Io(libc::EBADF))
    }

    fn first_step(&mut self, disk_op: DiskOp) -> Result<Step, DiskError> {
        Ok(match disk_op {
            DiskOp::Open { file, path, how } => {
                if self.files.contains_key(&file) {
                    return Err(DiskError::Io(libc::EBUSY));
                }
                Step::Open {
                    file,
                    path: file_path(&path)?,
                    how,
                    direct: wants_direct(how.class),
                }
            }
            DiskOp::Close { file } => Step::Close(self.take_file(file)?),
            DiskOp::Write { file, pos, bufs } => Step::Write(WriteFlight {
                fd: self.file(file)?.fd,
                pos,
                total: bufs.iter().map(|buf| buf.len()).sum(),
                bufs,
                done: 0,
                iovecs: Vec::new(),
            }),
            DiskOp::Read { file, pos, len } => Step::Read(self.read_flight(file, pos, len)?),
            DiskOp::Sync { file } => Step::Sync(self.file(file)?.fd),
            DiskOp::Resize { file, len } => Step::Resize(self.file(file)?.fd, len),
            DiskOp::Allocate { file, pos, len } => Step::Allocate {
                fd: self.file(file)?.fd,
                pos,
                len,
            },
            DiskOp::Rename { from, to } => Step::Rename(file_path(&from)?, file_path(&to)?),
            DiskOp::Unlink { path } => Step::Unlink {
                path: file_path(&path)?,
                flags: 0,
            },
            DiskOp::RemoveDir { path } => Step::Unlink {
                path: file_path(&path)?,
                flags: libc::AT_REMOVEDIR,
            },
            DiskOp::MakeDir { path } => Step::MakeDir(file_path(&path)?),
            DiskOp::SyncDir { path } => Step::OpenDir(directory_path(&path)?),
            DiskOp::SyncAll | DiskOp::List { .. } => {
                unreachable!("`start` gives these to the helper thread")
            }
        })
    }

    /// Takes the descriptor of `file` out of the table, unless an operation in flight uses it.
    fn take_file(&mut self, file: FileId) -> Result<RawFd, DiskError> {
        let open = self.files.remove(&file).ok_or(DiskError::Io(libc::EBADF))?;
        let OpenFile { fd, class, direct } = open;
        match Rc::try_unwrap(fd) {
            Ok(fd) => Ok(fd.into_raw_fd()),
            Err(fd) => {
                self.files.insert(file, OpenFile { fd, class, direct });
                Err(DiskError::Io(libc::EBUSY))
            }
        }
    }

    /// Direct reads cover whole blocks: `pos` 5000, `len` 100 reads 4096..8192 and answers bytes 904..1004 of it.
    fn read_flight(&self, file: FileId, pos: u64, len: usize) -> Result<ReadFlight, DiskError> {
        let open = self.file(file)?;
        let align = if open.direct { self.align } else { 1 };
        let skip = (pos % align as u64) as usize;
        let span = skip
            .checked_add(len)
            .and_then(|span| span.checked_next_multiple_of(align))
            .filter(|span| *span <= isize::MAX as usize)
            .ok_or(DiskError::Io(libc::EINVAL))?;
        Ok(ReadFlight {
            fd: open.fd,
            pos: pos - skip as u64,
            skip,
            len,
            span,
            got: 0,
            buf: AppendBuf::with_capacity(span),
        })
    }

    /// Gives the flight's current step to the ring.
    fn push(&mut self, ring: &mut Ring, key: Key) {
        let root = types::Fd(self.root.as_raw_fd());
        let flight = self.flights.get_mut(key).expect("only living flights are pushed");
        let entry = entry_of(root, &mut flight.step);
        // SAFETY: paths, vectors, buffers and descriptors of the entry belong to the flight, on the heap, and are
        // neither changed nor dropped before `complete` sees the completion of this key.
        unsafe { ring.push(Tag::new(Kind::Disk, key), entry) };
    }

    /// Takes a completion of the ring; `Some` when the operation ended.
    pub(super) fn complete(&mut self, ring: &mut Ring, key: Key, result: i32) -> Option<Completion> {
        let Some(flight) = self.flights.get_mut(key) else {
            ring.stats.stale += 1;
            return None;
        };
        let result = if result < 0 {
            Err(-result)
        } else {
            Ok(result as usize)
        };
        let next = match (&result, &flight.step) {
            // A sync that failed is final, whatever the errno.
            (Err(libc::EINTR | libc::EAGAIN), step)
                if !matches!(step, Step::Sync(_) | Step::SyncDir(_) | Step::Close(_))
                    && flight.retries < MAX_RETRIES =>
            {
                flight.retries += 1;
                Next::Again
            }
            _ => match &mut flight.step {
                Step::Open { .. } => self.opened(key, result),
                Step::OpenDir(_) => opened_dir(&mut flight.step, result),
                Step::Write(write) => write.advance(result),
                Step::Read(read) => read.advance(result),
                _ => Next::End(result.map(|_| Done::Ok).map_err(disk_error)),
            },
        };
        match next {
            Next::Again => {
                ring.stats.resubmitted += 1;
                self.push(ring, key);
                None
            }
            Next::Step => {
                self.push(ring, key);
                None
            }
            Next::End(result) => self.end(ring, key, result),
        }
    }

    /// Takes what the helper thread has done.
    pub(super) fn complete_helped(&mut self, ring: &mut Ring) -> Vec<Completion> {
        let answers = self.helper.answers();
        answers
            .into_iter()
            .filter_map(|(key, result)| self.end(ring, key, result))
            .collect()
    }

    fn end(&mut self, ring: &mut Ring, key: Key, result: Result<Done, DiskError>) -> Option<Completion> {
        let Some(flight) = self.flights.remove(key) else {
            ring.stats.stale += 1;
            return None;
        };
        while self.flights.len() < self.depth {
            let Some((op, disk_op)) = self.queue.pop_front() else {
                break;
            };
            self.start(ring, op, disk_op);
        }
        Some(Completion {
            op: flight.op,
            result,
        })
    }

    fn opened(&mut self, key: Key, result: Result<usize, i32>) -> Next {
        let Some(Flight {
            step: Step::Open {
                file, how, direct, ..
            },
            ..
        }) = self.flights.get_mut(key)
        else {
            unreachable!("the caller saw this flight open a file");
        };
        let fd = match result {
            // SAFETY: the kernel just opened this descriptor for us; nobody else knows it.
            Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd as RawFd) },
            Err(libc::EINVAL) if *direct => {
                *direct = false;
                self.direct_refused = true;
                return Next::Step;
            }
            Err(errno) => return Next::End(Err(disk_error(errno))),
        };
        let len = match file_len(&fd) {
            Ok(len) => len,
            Err(errno) => return Next::End(Err(disk_error(errno))),
        };
        let open = OpenFile {
            fd: Rc::new(fd),
            class: how.class,
            direct: *direct,
        };
        // An open of the same id may have overtaken this one; the core never does that, so the newer file wins.
        self.files.insert(*file, open);
        Next::End(Ok(Done::Opened { len }))
    }

    /// Keeps everything the kernel may still use alive for ever: when it did not let go in time.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.flights, Slab::new()));
    }
}

/// What a completion leads to.
enum Next {
    /// The same step once more.
    Again,
    /// The flight's next step.
    Step,
    End(Result<Done, DiskError>),
}

impl WriteFlight {
    fn advance(&mut self, result: Result<usize, i32>) -> Next {
        match result {
            // A write that makes no progress would loop for ever.
            Ok(0) => Next::End(Err(DiskError::Io(libc::EIO))),
            Ok(count) => {
                self.done += count;
                if self.done < self.total {
                    return Next::Again;
                }
                Next::End(Ok(Done::Ok))
            }
            Err(errno) => Next::End(Err(disk_error(errno))),
        }
    }

    /// Points the vector at the bytes not yet written.
    fn fill_iovecs(&mut self) {
        self.iovecs.clear();
        let (mut skip, mut room) = (self.done, MAX_TRANSFER);
        for buf in &self.bufs {
            if skip >= buf.len() {
                skip -= buf.len();
                continue;
            }
            let rest = &buf[skip..];
            skip = 0;
            let len = rest.len().min(room);
            self.iovecs.push(libc::iovec {
                iov_base: rest.as_ptr().cast_mut().cast(),
                iov_len: len,
            });
            room -= len;
            if room == 0 || self.iovecs.len() == MAX_IOVECS {
                break;
            }
        }
    }
}

impl ReadFlight {
    fn advance(&mut self, result: Result<usize, i32>) -> Next {
        let count = match result {
            Ok(count) => count,
            Err(errno) => return Next::End(Err(disk_error(errno))),
        };
        self.got += count;
        if count > 0 && self.got < self.span && !self.at_end() {
            return Next::Again;
        }
        let end = self.got.min(self.skip + self.len);
        self.buf.advance(self.got);
        Next::End(Ok(Done::Read(self.buf.slice(self.skip.min(end)..end))))
    }

    /// Whether the file ends where the read stopped. Spares a read after every last block; an error says no, and the
    /// next read meets it.
    fn at_end(&self) -> bool {
        file_len(&self.fd).is_ok_and(|len| self.pos + self.got as u64 >= len)
    }
}

fn opened_dir(step: &mut Step, result: Result<usize, i32>) -> Next {
    match result {
        // SAFETY: the kernel just opened this descriptor for us; nobody else knows it.
        Ok(fd) => *step = Step::SyncDir(unsafe { OwnedFd::from_raw_fd(fd as RawFd) }),
        Err(errno) => return Next::End(Err(disk_error(errno))),
    }
    Next::Step
}

/// The request of a step. What it points to belongs to the step and is on the heap.
fn entry_of(root: types::Fd, step: &mut Step) -> squeue::Entry {
    let fd = |fd: &OwnedFd| types::Fd(fd.as_raw_fd());
    match step {
        Step::Open {
            path, how, direct, ..
        } => opcode::OpenAt::new(root, path.as_ptr())
            .flags(open_flags(*how, *direct))
            .mode(FILE_MODE)
            .build(),
        // On a worker: the last close of an unlinked file frees its blocks.
        Step::Close(fd) => opcode::Close::new(types::Fd(*fd))
            .build()
            .flags(squeue::Flags::ASYNC),
        Step::Write(write) => {
            write.fill_iovecs();
            let (target, pos) = (fd(&write.fd), write.pos + write.done as u64);
            match write.iovecs.as_slice() {
                [one] => opcode::Write::new(target, one.iov_base.cast(), one.iov_len as u32)
                    .offset(pos)
                    .build(),
                many => opcode::Writev::new(target, many.as_ptr(), many.len() as u32)
                    .offset(pos)
                    .build(),
            }
        }
        Step::Read(read) => {
            let (pos, span) = (read.pos + read.got as u64, read.span);
            let rest = &mut read.buf.spare()[read.got..span];
            let len = rest.len().min(MAX_TRANSFER) as u32;
            opcode::Read::new(fd(&read.fd), rest.as_mut_ptr(), len)
                .offset(pos)
                .build()
        }
        Step::Sync(file) => opcode::Fsync::new(fd(file))
            .flags(types::FsyncFlags::DATASYNC)
            .build(),
        Step::Resize(file, len) => opcode::Ftruncate::new(fd(file), *len).build(),
        Step::Allocate { fd: file, pos, len } => opcode::Fallocate::new(fd(file), *len).offset(*pos).build(),
        Step::Rename(from, to) => opcode::RenameAt::new(root, from.as_ptr(), root, to.as_ptr()).build(),
        Step::Unlink { path, flags } => opcode::UnlinkAt::new(root, path.as_ptr()).flags(*flags).build(),
        Step::MakeDir(path) => opcode::MkDirAt::new(root, path.as_ptr()).mode(DIR_MODE).build(),
        Step::OpenDir(path) => opcode::OpenAt::new(root, path.as_ptr())
            .flags(libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC)
            .build(),
        Step::SyncDir(dir) => opcode::Fsync::new(fd(dir)).build(),
        Step::Helper => unreachable!("the helper thread has this flight, it is never pushed"),
    }
}

fn wants_direct(class: FileClass) -> bool {
    match class {
        FileClass::Journal | FileClass::Checkpoint | FileClass::Segment | FileClass::Index => true,
        FileClass::Epochs | FileClass::Meta => false,
    }
}

fn open_flags(how: OpenHow, direct: bool) -> i32 {
    let mut flags = libc::O_CLOEXEC;
    flags |= if how.write { libc::O_RDWR } else { libc::O_RDONLY };
    if how.create {
        flags |= libc::O_CREAT;
    }
    if direct {
        flags |= libc::O_DIRECT;
    }
    if how.class == FileClass::Journal {
        flags |= libc::O_DSYNC;
    }
    flags
}

fn file_len(fd: &OwnedFd) -> Result<u64, i32> {
    // SAFETY: all-zero is a valid `stat`, which lives across the call.
    let (result, stat) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd.as_raw_fd(), &raw mut stat), stat)
    };
    if result < 0 {
        return Err(last_errno());
    }
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// A path below the data directory, or EINVAL.
fn file_path(path: &str) -> Result<CString, DiskError> {
    let refused = DiskError::Io(libc::EINVAL);
    if path.is_empty() || path.starts_with('/') || path.split('/').any(|part| part == "..") {
        return Err(refused);
    }
    CString::new(path).map_err(|_| refused)
}

/// Like [`file_path`]; the empty path is the data directory itself.
fn directory_path(path: &str) -> Result<CString, DiskError> {
    file_path(if path.is_empty() { "." } else { path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_never_leave_the_data_directory() {
        for bad in ["", "/etc", "..", "a/../../b", "a/..", "a\0b"] {
            assert_eq!(file_path(bad), Err(DiskError::Io(libc::EINVAL)), "{bad:?}");
        }
        for good in ["a", "a/b", "..a/b..", "journal/1/0/000"] {
            assert_eq!(file_path(good).unwrap().to_str(), Ok(good));
        }
        assert_eq!(directory_path("").unwrap().as_c_str(), c".");
    }

    #[test]
    fn a_short_write_continues_with_the_rest_of_the_same_bytes() {
        let bufs: Vec<BufSlice> = [&b"abcd"[..], b"", b"efg", b"h"].map(BufSlice::copy_of).into();
        let mut write = WriteFlight {
            fd: Rc::new(super::super::helper::eventfd().unwrap()),
            pos: 0,
            total: 8,
            bufs,
            done: 0,
            iovecs: Vec::new(),
        };
        let rest = |write: &mut WriteFlight| {
            write.fill_iovecs();
            write.iovecs.iter().map(|v| v.iov_len).collect::<Vec<_>>()
        };
        assert_eq!(rest(&mut write), [4, 3, 1]);
        assert!(matches!(write.advance(Ok(5)), Next::Again));
        assert_eq!(rest(&mut write), [2, 1]);
        assert!(matches!(write.advance(Ok(2)), Next::Again));
        assert_eq!(rest(&mut write), [1]);
        assert!(matches!(write.advance(Ok(1)), Next::End(Ok(Done::Ok))));
        assert!(matches!(write.advance(Ok(0)), Next::End(Err(DiskError::Io(_)))));
        assert!(matches!(
            write.advance(Err(libc::ENOSPC)),
            Next::End(Err(DiskError::NoSpace))
        ));
    }
}
