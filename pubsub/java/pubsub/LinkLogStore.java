package pubsub;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import io.delta.storage.HadoopFileSystemLogStore;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.net.URI;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Paths;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.BasicFileAttributes;
import java.util.HashSet;
import java.util.Iterator;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import java.util.regex.Pattern;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * A Delta LogStore for local directories: a commit is exclusive between processes, and durable when it is made.
 *
 * Delta's own store for such directories looks whether a name is free and then renames, so two JVMs can both get it,
 * and it leaves durability to the operating system. Here the data files and deletion vectors that the commit names are
 * fsynced first, whoever wrote them, and their directories. Then the commit is written and fsynced under another name,
 * and linked to its own, which fails if that is taken; then the log's directory is fsynced. A commit that names a file
 * that does not exist fails. A table's first commit makes the names of its directories durable, too.
 */
public class LinkLogStore extends HadoopFileSystemLogStore {

    private static final String Z85 =
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";

    private static final String FIRST = String.format("%020d.json", 0L);
    private static final String LAST_CHECKPOINT = "_last_checkpoint";

    private static final Pattern COMMIT = Pattern.compile("[0-9]{20}[.]json");

    /** What was listed of each log, by its directory. */
    private static final Map LISTED = new ConcurrentHashMap();

    private final ObjectMapper json = new ObjectMapper();

    public LinkLogStore(Configuration configuration) {
        super(configuration);
    }

    public void write(Path path, Iterator actions, Boolean overwrite, Configuration configuration) throws IOException {
        java.nio.file.Path target = Paths.get(path.toUri().getPath());
        java.nio.file.Path directory = target.getParent();
        java.nio.file.Path aside = directory.resolve("." + target.getFileName() + "." + UUID.randomUUID() + ".tmp");
        Set directories = new HashSet();
        try {
            FileChannel file = FileChannel.open(aside, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE);
            try {
                while (actions.hasNext()) {
                    String line = (String) actions.next();
                    if (line.startsWith("{\"add\"")) {
                        syncNamed(json.readTree(line).get("add"), directory.getParent(), directories);
                    } else if (line.startsWith("{\"cdc\"")) {
                        syncNamed(json.readTree(line).get("cdc"), directory.getParent(), directories);
                    }
                    ByteBuffer bytes = ByteBuffer.wrap((line + "\n").getBytes(StandardCharsets.UTF_8));
                    while (bytes.hasRemaining()) {
                        file.write(bytes);
                    }
                }
                file.force(true);
            } finally {
                file.close();
            }
            if (target.getFileName().toString().equals(FIRST)) {
                noteAncestors(directory, directories);
            } else if (target.getFileName().toString().equals(LAST_CHECKPOINT)) {
                syncCheckpoint(aside, directory, directories);
            }
            for (Iterator each = directories.iterator(); each.hasNext(); ) {
                sync((java.nio.file.Path) each.next());
            }
            if (overwrite.booleanValue()) {
                Files.move(aside, target, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
                // Another Spark's checksum of the file before.
                Files.deleteIfExists(directory.resolve("." + target.getFileName() + ".crc"));
            } else {
                link(aside, target);
            }
        } finally {
            Files.deleteIfExists(aside);
        }
        sync(directory);
    }

    /**
     * List the files from this name on, by name.  Each commit lists the log, which may hold the commits of weeks, of which only
     * the newest are asked for.  Therefore the names that were found are remembered, and of the commits after the newest one
     * the system is asked by their names, until one is missing.  All names are listed again if that newest commit is gone (a
     * clean-up, or another table), if another checkpoint was announced, or for names before those that are remembered.
     */
    public Iterator listFrom(Path path, Configuration configuration) throws IOException {
        FileSystem files = path.getFileSystem(configuration);
        Path directory = files.makeQualified(path.getParent());
        java.nio.file.Path local = Paths.get(directory.toUri().getPath());
        Listed listed = (Listed) LISTED.get(local);
        if (listed == null || !listed.serves(path.getName())) {
            listed = new Listed(local, path.getName(), directory);
            LISTED.put(local, listed);
        }
        TreeMap found = new TreeMap();
        for (Iterator each = listed.from(path.getName()).iterator(); each.hasNext(); ) {
            String name = (String) each.next();
            try {
                found.put(name, status(new Path(directory, name), local.resolve(name), files.getDefaultBlockSize(path)));
            } catch (NoSuchFileException error) {
                // Removed since, as an expired commit or a file that is being written.
                listed.forget(name);
            }
        }
        return found.values().iterator();
    }

    /** The names in a log's directory from `first` on, with the commits up to `newest`. */
    private static final class Listed {

        private final java.nio.file.Path directory;
        private final String first;
        private final Object announced;
        private final TreeSet names = new TreeSet();
        private long newest = -1L;

        Listed(java.nio.file.Path directory, String first, Path shown) throws IOException {
            this.directory = directory;
            this.first = first;
            // Looked at before the list, so that a checkpoint which is announced meanwhile is looked for again.
            this.announced = announcement(directory);
            String[] all = directory.toFile().list();
            if (all == null) {
                throw new FileNotFoundException("No such file or directory: " + shown);
            }
            for (int place = 0; place < all.length; place++) {
                String name = all[place];
                // Hadoop does not list its checksums of files.
                if (name.compareTo(first) >= 0 && !(name.startsWith(".") && name.endsWith(".crc"))) {
                    names.add(name);
                    if (name.length() == FIRST.length() && COMMIT.matcher(name).matches()) {
                        newest = Math.max(newest, Long.parseLong(name.substring(0, 20)));
                    }
                }
            }
        }

        synchronized boolean serves(String from) throws IOException {
            return newest >= 0
                && from.compareTo(first) >= 0
                && Files.exists(directory.resolve(commit(newest)))
                && announced.equals(announcement(directory));
        }

        synchronized TreeSet from(String name) {
            while (Files.exists(directory.resolve(commit(newest + 1)))) {
                newest++;
                names.add(commit(newest));
            }
            // A commit's checksum file comes after it.
            for (long version = Math.max(0L, newest - 1); version <= newest; version++) {
                String checksum = String.format("%020d.crc", version);
                if (Files.exists(directory.resolve(checksum))) {
                    names.add(checksum);
                }
            }
            return new TreeSet(names.tailSet(name));
        }

        synchronized void forget(String name) {
            names.remove(name);
        }

        private static String commit(long version) {
            return String.format("%020d.json", version);
        }

        /** Return what distinguishes one announcement of a checkpoint from another. */
        private static Object announcement(java.nio.file.Path directory) throws IOException {
            try {
                BasicFileAttributes found =
                    Files.readAttributes(directory.resolve(LAST_CHECKPOINT), BasicFileAttributes.class);
                return found.fileKey() + " " + found.lastModifiedTime() + " " + found.size();
            } catch (NoSuchFileException error) {
                return "none";
            }
        }
    }

    /** Delta asks for neither owner nor permissions, which Hadoop's own status of a local file looks for, too. */
    private static FileStatus status(Path path, java.nio.file.Path local, long block) throws IOException {
        BasicFileAttributes found = Files.readAttributes(local, BasicFileAttributes.class);
        return new FileStatus(found.size(), found.isDirectory(), 1, block, found.lastModifiedTime().toMillis(), path);
    }

    /** Checkpoints do not come through this store: Delta must write them under another name, and rename them. */
    public Boolean isPartialWriteVisible(Path path, Configuration configuration) {
        return Boolean.TRUE;
    }

    /** Note all directories that name a new table: its own and its log's may be new, and others above them. */
    private static void noteAncestors(java.nio.file.Path directory, Set directories) {
        for (java.nio.file.Path each = directory.getParent(); each != null; each = each.getParent()) {
            if (Files.isReadable(each)) {
                directories.add(each);
            }
        }
    }

    /** Fsync the files of a checkpoint before it is announced: Delta then removes commits that it replaces. */
    private void syncCheckpoint(java.nio.file.Path announcement, java.nio.file.Path directory, Set directories)
            throws IOException {
        JsonNode announced = json.readTree(announcement.toFile());
        String prefix = String.format("%020d.checkpoint.", announced.get("version").asLong());
        java.nio.file.Path sidecars = directory.resolve("_sidecars");
        syncFiles(directory, prefix);
        directories.add(directory);
        if (Files.isDirectory(sidecars)) {
            syncFiles(sidecars, prefix);
            directories.add(sidecars);
        }
    }

    private static void syncFiles(java.nio.file.Path directory, String prefix) throws IOException {
        String[] names = directory.toFile().list();
        for (int place = 0; names != null && place < names.length; place++) {
            if (names[place].startsWith(prefix) || names[place].startsWith("." + prefix)) {
                sync(directory.resolve(names[place]));
            }
        }
    }

    /** Fsync the files that an `add` names, and note the directories between them and the table. */
    private static void syncNamed(JsonNode add, java.nio.file.Path table, Set directories) throws IOException {
        syncFile(local(URI.create(add.get("path").asText()), table), table, directories);
        JsonNode vector = add.get("deletionVector");
        if (vector == null || vector.isNull()) {
            return;
        }
        String place = vector.get("pathOrInlineDv").asText();
        String storage = vector.get("storageType").asText();
        if (storage.equals("p")) {
            syncFile(local(URI.create(place), table), table, directories);
        } else if (storage.equals("u")) {
            int prefix = place.length() - 20;
            String name = "deletion_vector_" + uuid(place.substring(prefix)) + ".bin";
            syncFile(table.resolve(place.substring(0, prefix)).resolve(name), table, directories);
        }
    }

    /** Return the path of a file in a local directory, null for another store's. */
    private static java.nio.file.Path local(URI uri, java.nio.file.Path table) {
        if (uri.getScheme() != null && !uri.getScheme().equals("file")) {
            return null;
        }
        return table.resolve(uri.getPath());
    }

    private static void syncFile(java.nio.file.Path file, java.nio.file.Path table, Set directories)
            throws IOException {
        if (file == null) {
            return;
        }
        sync(file);
        // Hadoop's checksums of a file that Spark wrote: a reader refuses the file if they are damaged.
        java.nio.file.Path checksums = file.resolveSibling("." + file.getFileName() + ".crc");
        if (Files.exists(checksums)) {
            sync(checksums);
        }
        java.nio.file.Path directory = file.getParent();
        directories.add(directory);
        while (directory.startsWith(table) && !directory.equals(table)) {
            directory = directory.getParent();
            directories.add(directory);
        }
    }

    /** Fsync a file or a directory. */
    private static void sync(java.nio.file.Path path) throws IOException {
        FileChannel opened = FileChannel.open(path, StandardOpenOption.READ);
        try {
            opened.force(true);
        } finally {
            opened.close();
        }
    }

    /** Decode the 20 characters that stand for a deletion vector's UUID (PROTOCOL.md, Deletion Vectors). */
    private static UUID uuid(String text) {
        long[] words = new long[4];
        for (int place = 0; place < 20; place++) {
            words[place / 5] = words[place / 5] * 85 + Z85.indexOf(text.charAt(place));
        }
        return new UUID(words[0] << 32 | words[1], words[2] << 32 | words[3]);
    }

    /** Over a network an answer can be lost, and the repeated request then finds the name taken: by this file. */
    private static void link(java.nio.file.Path aside, java.nio.file.Path target) throws IOException {
        try {
            Files.createLink(target, aside);
        } catch (IOException error) {
            if (!Files.exists(target) || !Files.isSameFile(aside, target)) {
                throw error;
            }
        }
    }
}
