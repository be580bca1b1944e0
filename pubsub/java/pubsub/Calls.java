package pubsub;

import java.lang.reflect.Constructor;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.SaveMode;
import scala.Option;
import scala.collection.mutable.Growable;
import scala.collection.mutable.ListBuffer;

/**
 * Several calls of Delta's internal classes in one.
 *
 * A call from Python takes two changes of threads, and two more when Python forgets its result.  On a busy machine these,
 * and not Delta, take most of the time of a commit whose actions are handed over one by one.  (Delta's classes are called
 * by reflection since the compiler, Janino, cannot read Scala's.)
 */
public class Calls {

    private static final Object[] NONE = new Object[0];
    private static final Method SET_ACTIVE_SESSION;
    private static final Method FOR_TABLE;
    private static final Method START;
    private static final Method READ_VERSION;
    private static final Method METADATA;
    private static final Method ID;
    private static final Method READ_WHOLE_TABLE;
    private static final Method TRACK_READ;
    private static final Method READ_TXN;
    private static final Method FROM_JSON;
    private static final Constructor WRITE;
    private static final Method COMMIT;

    static {
        try {
            Class log = Class.forName("org.apache.spark.sql.delta.DeltaLog");
            Class transaction = Class.forName("org.apache.spark.sql.delta.OptimisticTransaction");
            Class[] none = new Class[0];
            Class session = Class.forName("org.apache.spark.sql.SparkSession");
            SET_ACTIVE_SESSION = Class.forName("org.apache.spark.sql.classic.SparkSession")
                .getMethod("setActiveSession", new Class[] {session});
            FOR_TABLE = log.getMethod("forTable", new Class[] {session, Path.class});
            START = log.getMethod("startTransaction", none);
            READ_VERSION = transaction.getMethod("readVersion", none);
            METADATA = transaction.getMethod("metadata", none);
            ID = Class.forName("org.apache.spark.sql.delta.actions.Metadata").getMethod("id", none);
            READ_WHOLE_TABLE = transaction.getMethod("readWholeTable", none);
            TRACK_READ = transaction.getMethod("trackReadPredicates",
                new Class[] {Class.forName("scala.collection.immutable.Seq"), boolean.class, boolean.class});
            READ_TXN = transaction.getMethod("readTxn", none);
            FROM_JSON = Class.forName("org.apache.spark.sql.delta.actions.Action")
                .getMethod("fromJson", new Class[] {String.class});
            Class o = Option.class;
            WRITE = Class.forName("org.apache.spark.sql.delta.DeltaOperations$Write")
                .getConstructor(new Class[] {SaveMode.class, o, o, o, o, o, o, o, o});
            COMMIT = transaction.getMethod("commit", new Class[] {
                Class.forName("scala.collection.immutable.Seq"),
                Class.forName("org.apache.spark.sql.delta.DeltaOperations$Operation"),
            });
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }

    /**
     * Begin a transaction that conflicts with every later commit that changes the table, or an application's version.
     *
     * `applications`: one in each line.  `part`: the condition on `add` actions that the commit was worked out from; other
     * changes are no conflict then; null: the whole table was.  Returns null if the table is at another version, or is another table than that
     * of the id.  The session becomes this thread's: Delta's own threads, and what it does after a commit, ask for it;
     * without one a checkpoint cannot be read (DeltaThreadPool.scala: NonFateSharingFuture).
     */
    public static Object begin(
        Object session, String path, long version, String tableId, String applications, String part)
        throws Throwable {
        call(SET_ACTIVE_SESSION, null, new Object[] {session});
        Object log = call(FOR_TABLE, null, new Object[] {session, new Path(path)});
        Object transaction = call(START, log, NONE);
        long at = ((Number) call(READ_VERSION, transaction, NONE)).longValue();
        if (at != version) {
            return null;
        }
        if (at >= 0 && !call(ID, call(METADATA, transaction, NONE), NONE).equals(tableId)) {
            return null;
        }
        if (part == null) {
            call(READ_WHOLE_TABLE, transaction, NONE);
        } else {
            ListBuffer condition = new ListBuffer();
            condition.addOne(parsed(session, part));
            call(TRACK_READ, transaction, new Object[] {condition.toList(), Boolean.TRUE, Boolean.FALSE});
        }
        Growable read = (Growable) call(READ_TXN, transaction, NONE);
        String[] each = applications.split("\n");
        for (int place = 0; place < each.length; place++) {
            if (!each[place].isEmpty()) {
                read.addOne(each[place]);
            }
        }
        return transaction;
    }

    private static Object parsed(Object session, String condition) throws Throwable {
        Object state = call(session.getClass().getMethod("sessionState", new Class[0]), session, NONE);
        Object parser = call(state.getClass().getMethod("sqlParser", new Class[0]), state, NONE);
        Class type = Class.forName("org.apache.spark.sql.catalyst.parser.ParserInterface");
        return call(type.getMethod("parseExpression", new Class[] {String.class}), parser, new Object[] {condition});
    }

    /** Return the actions that these lines are in Delta's log, as a Scala Seq. */
    public static Object actions(String lines) throws Throwable {
        ListBuffer found = new ListBuffer();
        String[] each = lines.split("\n");
        for (int place = 0; place < each.length; place++) {
            if (!each[place].isEmpty()) {
                found.addOne(call(FROM_JSON, null, new Object[] {each[place]}));
            }
        }
        return found.toList();
    }

    /** Commit the actions as DeltaOperations.Write does; null: without metadata of the user's. */
    public static void write(Object transaction, String lines, boolean overwrites, String userMetadata)
        throws Throwable {
        Option none = Option.empty();
        SaveMode mode = overwrites ? SaveMode.Overwrite : SaveMode.Append;
        Object operation = WRITE.newInstance(
            new Object[] {mode, none, none, Option.apply(userMetadata), none, none, none, none, none});
        call(COMMIT, transaction, new Object[] {actions(lines), operation});
    }

    private static Object call(Method method, Object on, Object[] arguments) throws Throwable {
        try {
            return method.invoke(on, arguments);
        } catch (InvocationTargetException error) {
            throw error.getCause();
        }
    }
}
