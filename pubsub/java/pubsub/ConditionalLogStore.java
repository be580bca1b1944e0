package pubsub;

import io.delta.storage.HadoopFileSystemLogStore;
import java.io.ByteArrayOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * A Delta LogStore for S3: a commit is exclusive between all writers that use conditional puts, in any process.
 *
 * Delta's own store for S3 looks whether a name is free and then puts the object, so of two drivers both can get it. This
 * one puts it with If-None-Match, which S3 itself decides. An object is durable when the store has answered.
 */
public class ConditionalLogStore extends HadoopFileSystemLogStore {

    public ConditionalLogStore(Configuration configuration) {
        super(configuration);
    }

    public void write(Path path, Iterator actions, Boolean overwrite, Configuration configuration) throws IOException {
        ByteArrayOutputStream lines = new ByteArrayOutputStream();
        while (actions.hasNext()) {
            lines.write(((String) actions.next()).getBytes(StandardCharsets.UTF_8));
            lines.write('\n');
        }
        byte[] bytes = lines.toByteArray();
        FileSystem files = path.getFileSystem(configuration);
        FSDataOutputStreamBuilder builder = files.createFile(path);
        builder.overwrite(overwrite.booleanValue());
        builder.recursive();
        if (!overwrite.booleanValue()) {
            builder.must("fs.option.create.conditional.overwrite", true);
        }
        IOException refused = null;
        FSDataOutputStream file = (FSDataOutputStream) builder.build();
        try {
            file.write(bytes, 0, bytes.length);
            file.close();
        } catch (IOException error) {
            refused = error;
        }
        if (refused == null) {
            return;
        }
        byte[] found = overwrite.booleanValue() ? null : contents(files, path);
        if (found == null) {
            throw refused;
        }
        // An answer can be lost, and the repeated request then finds the name taken: by this commit.
        if (!Arrays.equals(found, bytes)) {
            FileAlreadyExistsException taken = new FileAlreadyExistsException(path.toString());
            taken.initCause(refused);
            throw taken;
        }
    }

    /** Objects appear as a whole. */
    public Boolean isPartialWriteVisible(Path path, Configuration configuration) {
        return Boolean.FALSE;
    }

    private static byte[] contents(FileSystem files, Path path) throws IOException {
        FSDataInputStream file;
        try {
            file = files.open(path);
        } catch (FileNotFoundException error) {
            return null;
        }
        try {
            ByteArrayOutputStream found = new ByteArrayOutputStream();
            byte[] part = new byte[8192];
            for (int count = file.read(part); count >= 0; count = file.read(part)) {
                found.write(part, 0, count);
            }
            return found.toByteArray();
        } catch (FileNotFoundException error) {
            return null;
        } finally {
            file.close();
        }
    }
}
