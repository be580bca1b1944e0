package pubsub;

import java.lang.reflect.InvocationHandler;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;

/**
 * Refuses the transaction of a statement if the table is no longer where the statement's batch began.
 *
 * Delta skips a statement whose transaction version the table has already, and finds what other writers commit after
 * the statement's transaction has begun.  It does not know at which version the application must be.  So this observer
 * of Delta's transactions (TransactionExecutionObserver, one for each thread) asks the new transaction itself: then
 * nothing can come between the answer and the commit.
 */
public class VersionCheck implements InvocationHandler {

    /** Begins the exception's message. */
    public static final String REFUSED = "pubsub.VersionCheck: ";

    // How many later copies' first commits conflict with the statement's if they come after its transaction's beginning.
    private static final int LATER_COPIES = 8;

    private final String application;
    private final long version;

    private VersionCheck(String application, long version) {
        this.application = application;
        this.version = version;
    }

    /** Return an observer that requires the application to be at `version` (0: to have no version). */
    public static Object observer(String application, long version) throws ClassNotFoundException {
        ClassLoader loader = VersionCheck.class.getClassLoader();
        Class type = Class.forName("org.apache.spark.sql.delta.TransactionExecutionObserver", true, loader);
        return Proxy.newProxyInstance(loader, new Class[] {type}, new VersionCheck(application, version));
    }

    public Object invoke(Object proxy, Method method, Object[] arguments) throws Throwable {
        String name = method.getName();
        if (name.equals("startingTransaction")) {
            Object transaction = ((scala.Function0) arguments[0]).apply();
            check(transaction);
            return transaction;
        }
        if (name.equals("preparingCommit")) {
            return ((scala.Function0) arguments[0]).apply();
        }
        if (name.equals("createChild")) {
            return proxy;
        }
        if (name.equals("getNextObserver")) {
            return scala.Option.apply(null);
        }
        if (name.equals("hashCode")) {
            return Integer.valueOf(System.identityHashCode(proxy));
        }
        if (name.equals("equals")) {
            return Boolean.valueOf(proxy == arguments[0]);
        }
        if (name.equals("toString")) {
            return REFUSED + application;
        }
        return null;
    }

    private void check(Object transaction) throws Throwable {
        long at = Math.max(0, held(transaction, application));
        if (at != version) {
            throw new IllegalStateException(REFUSED + "it is at version " + at);
        }
        int slash = application.lastIndexOf('/');
        if (slash < 0 || !application.substring(slash + 1).matches("[0-9]+")) {
            return;
        }
        String table = application.substring(0, slash + 1);
        long generation = Long.parseLong(application.substring(slash + 1));
        Object snapshot = transaction.getClass().getMethod("snapshot", new Class[0]).invoke(transaction, new Object[0]);
        Object versions = snapshot.getClass().getMethod("transactions", new Class[0]).invoke(snapshot, new Object[0]);
        scala.collection.Iterator every = ((scala.collection.Map) versions).keysIterator();
        while (every.hasNext()) {
            String other = (String) every.next();
            if (other.startsWith(table)) {
                String number = other.substring(table.length()).split("/")[0];
                if (number.matches("[0-9]+") && Long.parseLong(number) > generation) {
                    throw new IllegalStateException(REFUSED + "it was copied anew, or is being copied");
                }
            }
        }
        for (int later = 1; later <= LATER_COPIES; later++) {
            held(transaction, table + (generation + later));
        }
    }

    /** Return an application's version, -1 if it has none. Delta notes the question: a later commit of it conflicts. */
    private static long held(Object transaction, String application) throws Throwable {
        Method question = transaction.getClass().getMethod("txnVersion", new Class[] {String.class});
        return ((Number) question.invoke(transaction, new Object[] {application})).longValue();
    }
}
