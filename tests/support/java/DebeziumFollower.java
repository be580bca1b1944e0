// Debezium's engine with the properties in a file: a line for each event, its topic and value; ends when standard input does.

import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.InputStream;
import java.io.PrintStream;
import java.util.Properties;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

public class DebeziumFollower {
    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        try (InputStream file = new FileInputStream(arguments[0])) {
            properties.load(file);
        }
        PrintStream output = new PrintStream(new FileOutputStream(FileDescriptor.out), false, "UTF-8");
        DebeziumEngine<ChangeEvent<String, String>> engine = DebeziumEngine.create(Json.class).using(properties)
            .using((success, message, error) -> {
                if (error != null) {
                    error.printStackTrace();
                }
                if (!success) {
                    Runtime.getRuntime().halt(1);
                }
            })
            .notifying((events, committer) -> {
                for (ChangeEvent<String, String> event : events) {
                    output.println(event.destination() + "\t" + event.value());
                    committer.markProcessed(event);
                }
                output.flush();
                committer.markBatchFinished();
            }).build();
        ExecutorService executor = Executors.newSingleThreadExecutor();
        executor.execute(engine);
        while (System.in.read() >= 0) {
            continue;
        }
        engine.close();
        executor.shutdown();
        executor.awaitTermination(60, TimeUnit.SECONDS);
        System.exit(0);
    }
}
