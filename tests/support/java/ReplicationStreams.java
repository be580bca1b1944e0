// The replication API of PostgreSQL's JDBC driver, as its documentation shows it; one line for each thing that is seen.
//
// Arguments: URL, user, slot, output plugin, the number of messages to read, then names and values of the plugin's options.

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import org.postgresql.PGConnection;
import org.postgresql.PGProperty;
import org.postgresql.replication.LogSequenceNumber;
import org.postgresql.replication.PGReplicationStream;
import org.postgresql.replication.ReplicationSlotInfo;
import org.postgresql.replication.fluent.logical.ChainedLogicalStreamBuilder;

public class ReplicationStreams {
    public static void main(String[] arguments) throws Exception {
        String slot = arguments[2];
        String plugin = arguments[3];
        int messages = Integer.parseInt(arguments[4]);
        Properties properties = new Properties();
        PGProperty.USER.set(properties, arguments[1]);
        PGProperty.ASSUME_MIN_SERVER_VERSION.set(properties, "9.4");
        try (Connection sql = DriverManager.getConnection(arguments[0], properties)) {
            PGProperty.REPLICATION.set(properties, "database");
            PGProperty.PREFER_QUERY_MODE.set(properties, "simple");
            LogSequenceNumber confirmed;
            try (Connection connection = DriverManager.getConnection(arguments[0], properties)) {
                PGConnection replication = connection.unwrap(PGConnection.class);
                ReplicationSlotInfo made = replication.getReplicationAPI().createReplicationSlot()
                    .logical().withSlotName(slot).withOutputPlugin(plugin).make();
                System.out.println("made " + made.getSlotName() + " " + made.getOutputPlugin() + " "
                    + (made.getConsistentPoint().asLong() > 0) + " " + (made.getSnapshotName() != null));
                try {
                    replication.getReplicationAPI().createReplicationSlot()
                        .logical().withSlotName(slot).withOutputPlugin(plugin).make();
                } catch (SQLException error) {
                    System.out.println("twice " + error.getSQLState());
                }
                try (Statement statement = sql.createStatement()) {
                    statement.execute("INSERT INTO t SELECT g, 'jdbc ' || g FROM generate_series(1, 20) g");
                }
                confirmed = read(replication, arguments, made.getConsistentPoint(), messages);
            }
            while (confirmed(sql, slot) < confirmed.asLong()) {
                Thread.sleep(20);
            }
            System.out.println("confirmed");
            // PostgreSQL's walsender ends a second stream of a connection at once.
            try (Connection connection = DriverManager.getConnection(arguments[0], properties)) {
                PGConnection replication = connection.unwrap(PGConnection.class);
                try (Statement statement = sql.createStatement()) {
                    statement.execute("DELETE FROM t WHERE a = 1");
                }
                read(replication, arguments, LogSequenceNumber.INVALID_LSN, plugin.equals("pgoutput") ? 4 : 3);
                replication.getReplicationAPI().dropReplicationSlot(slot);
                System.out.println("dropped");
            }
        }
    }

    private static LogSequenceNumber read(PGConnection replication, String[] arguments, LogSequenceNumber start, int messages)
            throws Exception {
        ChainedLogicalStreamBuilder builder = replication.getReplicationAPI().replicationStream().logical()
            .withSlotName(arguments[2]).withStatusInterval(100, TimeUnit.MILLISECONDS).withStartPosition(start);
        for (int place = 5; place < arguments.length; place += 2) {
            builder = builder.withSlotOption(arguments[place], arguments[place + 1]);
        }
        try (PGReplicationStream stream = builder.start()) {
            LogSequenceNumber last = LogSequenceNumber.INVALID_LSN;
            int seen = 0;
            while (seen < messages) {
                ByteBuffer message = seen % 2 == 0 ? stream.read() : stream.readPending();
                if (message == null) {
                    TimeUnit.MILLISECONDS.sleep(5);
                    continue;
                }
                byte[] bytes = new byte[message.remaining()];
                message.get(bytes);
                seen++;
                if (arguments[3].equals("test_decoding")) {
                    System.out.println(new String(bytes, StandardCharsets.UTF_8));
                } else {
                    System.out.println((char) bytes[0] + " " + bytes.length);
                }
                last = stream.getLastReceiveLSN();
            }
            stream.setAppliedLSN(last);
            stream.setFlushedLSN(last);
            stream.forceUpdateStatus();
            return last;
        }
    }

    private static long confirmed(Connection sql, String slot) throws SQLException {
        try (Statement statement = sql.createStatement();
                ResultSet rows = statement.executeQuery(
                    "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '" + slot + "'")) {
            rows.next();
            return LogSequenceNumber.valueOf(rows.getString(1)).asLong();
        }
    }
}
